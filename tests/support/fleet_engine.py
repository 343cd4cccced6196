"""One vLLM engine that answers the requests of a job: run by vLLM's own Python, never imported.

`python fleet_engine.py JOB RESULT`. A request gives its images as pixels, as features of packages,
by name (for an engine that reads a store), or as pixels that go under another image's name, which
tells where the engine took the features from.
"""

import json
import os
import sys
from pathlib import Path

QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(job_file: str, result_file: str) -> None:
    os.environ.update(QUIET)
    job = json.loads(Path(job_file).read_text())
    import vllm
    from vllm.config import ECTransferConfig

    connector = job["connector"]
    engine = vllm.LLM(
        job["checkpoint"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 4, "video": 0},
        enable_mm_embeds=True,
        enable_prefix_caching=job.get("prefix_caching", False),
        ec_transfer_config=ECTransferConfig(**connector) if connector else None,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"], logprobs=1)
    answers = {}
    for case in job["cases"]:
        try:
            output = engine.generate(request(case), sampling, use_tqdm=False)[0].outputs[0]
        except ValueError as error:  # what the engine refuses at its door is a result too
            answers[case["name"]] = {"error": f"{type(error).__name__}: {error}"}
            continue
        answers[case["name"]] = {
            "text": output.text,
            "tokens": list(output.token_ids),
            "logprobs": [max(p.logprob for p in step.values()) for step in output.logprobs or []],
            "finish": output.finish_reason,
        }
    Path(result_file).write_text(json.dumps({"vllm": vllm.__version__, "answers": answers}))


def request(case: dict) -> dict:
    import torch
    from PIL import Image

    from keepsight.export import engines
    from keepsight.formats.package import Package

    packages = [Package.load(path) for path in case["packages"]]
    images = [Image.open(path).convert("RGB") for path in case["images"]]
    how, asked = case["how"], {"prompt": case["prompt"]}
    if how == "pixels":
        return asked | {"multi_modal_data": {"image": images}}
    if how == "features":
        return asked | {"multi_modal_data": engines.to_vllm(packages)}
    if how == "disguised":
        names = [engines.identifier(package) for package in packages]
        uuids = {"image": names}
        return asked | {"multi_modal_data": {"image": images}, "multi_modal_uuids": uuids}
    named = engines.named_for_vllm(packages)
    if how == "unknown name":
        named["multi_modal_uuids"] = {"image": ["keepsight-" + "0" * 64 for _ in packages]}
    if how == "another grid":
        grid = named["multi_modal_data"]["image"]["image_grid_thw"]
        named["multi_modal_data"] = {"image": {"image_grid_thw": grid * torch.tensor([1, 2, 1])}}
    if how == "turned grid":
        grid = named["multi_modal_data"]["image"]["image_grid_thw"]
        named["multi_modal_data"] = {"image": {"image_grid_thw": grid[:, [0, 2, 1]]}}
    return asked | named


if __name__ == "__main__":
    main(*sys.argv[1:])
