"""A small byte-level tokenizer with DeepSeek's control tokens, made on the spot."""

import json
from functools import cache
from pathlib import Path

import tokenizers

from kvlease.services.chat.v4_format import ASSISTANT, BOS, EOS, THINK, THINK_END, USER
from kvlease.services.chat.vocabulary import CheckpointVocabulary
from kvlease.services.tool_calls.markup import DSML

SPECIAL = [BOS, EOS]
PLAIN = [USER, ASSISTANT, THINK, THINK_END, DSML]
TEXTS = [
    "the tool answers the question, and the question is answered by the tool",
    '<invoke name="search"> parameter string="true" tool_calls </parameter>',
    "größer als früher 你好世界 🙂🙃 \n\n  return {'a': [1, 2, 3]}",
]


@cache
def tokenizer_json() -> str:
    """The text of a ``tokenizer.json``."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 8, trainer)
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in PLAIN])
    return made.to_str()


def write_tokenizer(folder: Path, **changes: object) -> Path:
    """Write the file, members replaced by ``changes``."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer_json()) | changes), encoding="utf-8")
    return path


def full_tokenizer() -> tokenizers.Tokenizer:
    """The package's own view of the file, the oracle of the tests."""
    return tokenizers.Tokenizer.from_str(tokenizer_json())


def bpe_vocabulary(folder: Path) -> CheckpointVocabulary:
    """Our view of the file."""
    return CheckpointVocabulary(write_tokenizer(folder))
