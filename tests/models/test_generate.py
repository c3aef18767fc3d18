from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from instar.config.language import ModelConfig
from instar.data.text.tokenizer import ByteTokenizer, train_bpe
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT, KVCache
from instar.models.module import SMALL_FLOPS, enough_threads
from instar.models.sampling import (
    SamplingOptions,
    TextStream,
    continuations,
    filter_logits,
    generate,
)

ARCH = resolve_architecture(
    ModelConfig(n_layer=1, n_head=2, n_embd=16, context=8, positions="rope"), 20
)
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def model() -> GPT:
    model = GPT(ARCH)
    model.init_weights(0)
    with torch.no_grad():
        model.token_embedding.weight *= 30  # so that the next token is far from uniform
    return model


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_prompt_is_continued(model: GPT) -> None:
    tokens = generate(model, PROMPT, 20, generator=generator_of(0))
    assert tokens.shape == (2, 23)
    assert torch.equal(tokens[:, :3], PROMPT)
    assert 0 <= tokens.min() <= tokens.max() < ARCH.vocab_size


def test_the_generator_decides(model: GPT) -> None:
    first = generate(model, PROMPT, 30, generator=generator_of(1))
    torch.manual_seed(99)
    assert torch.equal(first, generate(model, PROMPT, 30, generator=generator_of(1)))
    assert not torch.equal(first, generate(model, PROMPT, 30, generator=generator_of(2)))


def test_temperature_zero_takes_the_most_likely_token(model: GPT) -> None:
    tokens = generate(model, PROMPT, 3, SamplingOptions(temperature=0))
    for length in range(3, 6):
        assert torch.equal(tokens[:, length], model(tokens[:, :length])[:, -1].argmax(-1))


def test_one_most_likely_token_is_the_same_as_temperature_zero(model: GPT) -> None:
    assert torch.equal(
        generate(model, PROMPT, 12, SamplingOptions(top_k=1), generator=generator_of(3)),
        generate(model, PROMPT, 12, SamplingOptions(temperature=0)),
    )


def test_top_k_keeps_to_the_most_likely(model: GPT) -> None:
    likely = model(PROMPT)[:, -1].topk(3).indices
    for seed in range(30):
        tokens = generate(
            model,
            PROMPT,
            1,
            SamplingOptions(top_k=3, temperature=5.0),
            generator=generator_of(seed),
        )
        assert (likely == tokens[:, -1:]).any(1).all()


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_rows_without_a_token_are_never_drawn(model: GPT, temperature: float) -> None:
    with torch.no_grad():
        # the model would write nothing else
        model.token_embedding.weight[7:] *= 50
    tokens = generate(
        model,
        PROMPT,
        30,
        SamplingOptions(temperature=temperature, top_k=10),
        vocab_size=7,
        generator=generator_of(0),
    )
    assert tokens[:, 3:].max() < 7


def test_draws_follow_the_distribution_of_the_model(model: GPT) -> None:
    prompts = PROMPT[:1].expand(4000, 3)
    tokens = generate(
        model, prompts, 1, SamplingOptions(temperature=2.0), generator=generator_of(0)
    )[:, -1]
    expected = (model(PROMPT[:1])[0, -1] / 2.0).softmax(-1)
    shares = torch.bincount(tokens, minlength=ARCH.vocab_size) / 4000
    torch.testing.assert_close(shares, expected, rtol=0.0, atol=0.04)


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned", "n_layer": 2},
        {"positions": "rope", "n_layer": 2, "n_kv_head": 1, "qk_norm": True},
        {"n_layer": 1, "n_head": 4, "n_kv_head": 2},
        {"n_layer": 2, "conv_size": 5, "embedding_multiplier": 3.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_of_keys_and_values_changes_no_logits(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = GPT(
        resolve_architecture(ModelConfig(**{"n_embd": 16, "n_head": 2, "context": 8} | options), 20)
    )
    model.init_weights(0)
    model.eval().to(dtype)
    tokens = torch.arange(16).view(2, 8) * 7 % 20
    cache = KVCache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in (tokens[:, :3], *tokens[:, 3:].split(1, 1))]
        output, expected = torch.cat(parts, 1), model(tokens)
    assert len(cache) == 8
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0, "atol": 0.05}
    torch.testing.assert_close(output, expected, **close)
    with pytest.raises(ValueError, match="9 tokens do not fit into a context of 8"):
        model(tokens[:, :1], cache=cache)


def test_tokens_beyond_the_context_are_those_of_the_window(model: GPT) -> None:
    tokens = generate(model, PROMPT, 20, SamplingOptions(temperature=0))
    for end in range(3, 23):
        logits = model(tokens[:, max(0, end - ARCH.context) : end])[:, -1]
        assert torch.equal(tokens[:, end], logits.argmax(-1))


def test_only_the_last_context_is_seen(model: GPT) -> None:
    long = torch.arange(16)[None] % ARCH.vocab_size
    output = generate(model, long, 5, SamplingOptions(temperature=0))
    window = generate(model, long[:, -ARCH.context :], 5, SamplingOptions(temperature=0))
    assert torch.equal(output[:, -5:], window[:, -5:])


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = GPT(replace(ARCH, dropout=0.9))
    model.init_weights(0)
    first = generate(model, PROMPT, 8, SamplingOptions(temperature=0))
    assert torch.equal(first, generate(model, PROMPT, 8, SamplingOptions(temperature=0)))
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, not -1"),
        ({"top_k": 0}, "top_k must be 1 or more, not 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0"),
    ],
)
def test_senseless_settings_are_refused(
    model: GPT, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPT, 1, SamplingOptions(**options))  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, torch.empty(1, 0, dtype=torch.long), 1)


def test_logits_that_are_not_finite_are_told(model: GPT) -> None:
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(torch.inf)
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="not finite"):
            generate(model, PROMPT, 2, SamplingOptions(temperature=temperature))


def test_the_coldest_temperature_takes_the_most_likely(model: GPT) -> None:
    cold = generate(
        model, PROMPT, 6, SamplingOptions(temperature=1e-300), generator=generator_of(0)
    )
    assert torch.equal(cold, generate(model, PROMPT, 6, SamplingOptions(temperature=0)))


def test_a_small_model_computes_with_one_thread_and_leaves_the_others(model: GPT) -> None:
    torch.set_num_threads(2)
    used = set[int]()
    model.register_forward_hook(lambda *_: used.add(torch.get_num_threads()))
    generate(model, PROMPT, 2)
    assert used == {1}
    assert torch.get_num_threads() == 2
    with enough_threads(SMALL_FLOPS):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("top_k", [None, 1, 7, 90])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.95, 1.0])
def test_the_same_tokens_are_left_as_in_transformers(
    top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(50, 90, generator=generator_of(0)) * 4
    logits[:, 7:30] = logits[:, :23]  # as likely as others
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p else []
    expected = processors(torch.empty(50, 1, dtype=torch.long), logits)
    assert torch.equal(filter_logits(logits / 0.7, top_k, top_p), expected)


def test_a_sample_does_not_depend_on_the_others(model: GPT) -> None:
    tokenizer = train_bpe(["abc"], 257)
    with torch.no_grad():
        model.token_embedding.weight /= 15

    def texts(samples: int) -> list[str]:
        pieces = [""] * samples
        for number, piece in continuations(
            model, tokenizer, [1, 2], 20, samples, SamplingOptions(seed=5)
        ):
            pieces[number] += piece
        return pieces

    three = texts(3)
    assert len(set(three)) == 3
    assert texts(2) == three[:2]


TEXT = "Größe 2 × “3” 🙂 and so on"


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), train_bpe([TEXT], 262)], ids=["byte", "bpe"]
)
def test_text_comes_in_whole_characters(tokenizer: ByteTokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.add(int(token)) for token in tokenizer.encode(TEXT)]
    assert pieces.count("") >= len(TEXT.encode()) - len(TEXT) - 5  # waits for the rest
    assert "".join(pieces) == TEXT
    assert stream.add(0xF0) == ""
    assert stream.end() != ""  # half a character that is never completed


@pytest.mark.parametrize(
    "stops", [("so",), ("“3", "so"), ("never", "s"), ("and so on and on",), ()]
)
def test_text_ends_before_the_first_stop(stops: tuple[str, ...]) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, stops)
    text = "".join(stream.add(int(token)) for token in tokenizer.encode(TEXT))
    ends = [TEXT.find(stop) for stop in stops if stop in TEXT]
    assert stream.ended == bool(ends)
    assert text + stream.end() == TEXT[: min(ends, default=None)]
    assert not any(stop in text for stop in stops)
