"""The embedded model and its tokenizer: reproducible, whole, and alive in every part."""

import pytest
import torch

from kvlease.errors import ConfigError, UsageError
from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.kernels.models.embedded import EMBEDDED_CONFIG, RandomTensors
from kvlease.kernels.models.step_run import TokensDrawn
from kvlease.kernels.models.tokenizer import EOS, SPECIAL_TOKENS, ByteTokenizer
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import StepInput
from kvlease.protocols.readiness import Openings
from kvlease.units import LeaseId, StepId
from tests.kernels.rig import InlineStream, Rig, run_now


def test_weights_are_fixed_by_the_seed_and_never_zero() -> None:
    """A bias left at zero would hide an error in whatever adds it."""
    first, again, other = (RandomTensors(EMBEDDED_CONFIG, seed) for seed in (0, 0, 1))
    for name in first.names():
        value = first.tensor(name)
        assert torch.equal(value, again.tensor(name))
        assert not torch.equal(value, other.tensor(name))
        if value.is_floating_point():
            assert value.abs().min() > 0
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_known_numbers() -> None:
    """Pools, traces and documents quote these."""
    model = load_model(None, ModelOptions(exact=False))
    assert (model.vocab_size, model.max_positions) == (264, 32768)
    assert model.eos_tokens == {EOS}
    assert model.schema.num_layers == 4
    assert model.schema.needs_tail


def test_page_sizes_that_cut_a_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens 48"):
        load_model(None, ModelOptions(page_tokens=48, exact=False))


def test_greedy_answers_vary_with_the_prompt() -> None:
    """A model that says the same whatever it reads cannot show a corrupted prefix."""
    rig = Rig(load_model(None, ModelOptions(page_tokens=32)))
    prompts = [ByteTokenizer().encode(text) for text in ("alpha beta", "alpha betb", "zeta")]
    answers = []
    for tokens in prompts:
        sequence = rig.start(tokens)
        rig.step([(sequence, len(tokens))])
        for _ in range(8):
            sequence.tokens.append(sequence.drawn[-1])
            rig.step([(sequence, 1)])
        answers.append(tuple(sequence.drawn))
    assert len(set(answers)) == 3


def test_every_cached_component_reaches_the_logits() -> None:
    """Spoil one component of one layer behind a sequence: the next token's logits must change."""
    model = load_model(None, ModelOptions(page_tokens=32))
    # the last token ends a group of every ratio, so that running state counts as well
    tokens = [(7 * n) % 256 for n in range(224)]
    plain = Rig(model)
    sequence = plain.start(tokens)
    plain.run_alone(sequence, [223, 1])
    for layer in model.schema.layers:
        names = [part.name for part in layer.spans] + [part.name for part in layer.tails]
        for name in names:
            rig = Rig(model)
            other = rig.start(tokens)
            rig.run_alone(other, [223])
            store = rig.rows if (layer.id, name) in rig.rows else rig.rings
            store[layer.id, name].nan_to_num_(0.5).mul_(-1.5)
            rig.run_alone(other, [1])
            if "compressor" in name:
                # a row may be written wrong and not be among the chosen ones: look at the row
                changed = any(
                    not torch.equal(mine.view(torch.uint8), plain.rows[key].view(torch.uint8))
                    for key, mine in rig.rows.items()
                )
            else:
                changed = not torch.equal(other.logits[-1], sequence.logits[-1])
            assert changed, f"{name} of layer {layer.id}"


def test_tokenizer_is_bytes() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve ✓ <eos>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), EOS]) == text
    assert tokenizer.decode([0xFF, 300]) == "�"
    assert len(set(SPECIAL_TOKENS.values())) == 8
    assert max(SPECIAL_TOKENS.values()) < tokenizer.vocab_size


def test_misuse_is_refused() -> None:
    model = load_model(None, ModelOptions(exact=False))
    rig = Rig(model)
    lease = StepLease(LeaseId(1), [], [], rig, model.schema.num_layers, Openings(lambda: 0))
    with pytest.raises(UsageError, match="at least one"):
        run_now(model.forward(StepInput(StepId(1), ()), lease, InlineStream()))
    with pytest.raises(UsageError, match="still running"):
        TokensDrawn().tokens()
