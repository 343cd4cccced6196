"""The tokenizer: a small byte-level BPE that comes out the same however it is loaded.

Transformers puts another rule for cutting text into words in front of the merges, depending on the
model type and on its version: one keeps " 1" together, one cuts the digit off. Without a merge of
a space and a digit every rule gives the same tokens, so such merges are taken out.
"""

import json
import random
from collections.abc import Iterator

from questions import conversation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SIZE = 512
CONVERSATIONS = 20_000


def build() -> Tokenizer:
    """Learn the merges from conversations, then drop those that touch a digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return without_digit_merges(tokenizer)


def without_digit_merges(tokenizer: Tokenizer) -> Tokenizer:
    """Drop every merge that has a digit in it; the numbers of all tokens stay as they are."""
    parts = json.loads(tokenizer.to_str())
    merges = parts["model"]["merges"]
    kept = [pair for pair in merges if not any(c.isdigit() for c in "".join(pair))]
    parts["model"]["merges"] = kept
    return Tokenizer.from_str(json.dumps(parts))


def _texts() -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(CONVERSATIONS):
        for role, content in conversation(rng):
            yield role
            yield from (part for part in content if isinstance(part, str))
    for number in range(1, 40):
        yield f"Picture {number}: "
    yield "You are a helpful assistant. system user assistant tool"
