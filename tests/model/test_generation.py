"""Generation: padding changes nothing, every end token ends, and a stream adds up to the answer."""

import pytest
import torch

from longtune.model.generation import encode_prompt, generate, stop_tokens
from longtune.model.loading import load_model
from tiny_run import write_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


def chat(text):
    return [{"role": "user", "content": text}]


def test_a_batch_answers_as_one_by_one(loaded):
    prompts = ["a", chat("a longer question than the others"), chat("b"), "some text"]
    together = generate(loaded.model, loaded.tokenizer, prompts, max_new_tokens=8, batch_size=4)
    alone = [generate(loaded.model, loaded.tokenizer, [prompt], max_new_tokens=8)[0] for prompt in prompts]
    assert together == alone
    assert all(together)


def test_a_conversation_ends_where_the_answer_begins(loaded):
    text = loaded.tokenizer.decode(encode_prompt(loaded.tokenizer, chat("hello")))
    assert text == "<|user|>hello<eos><|assistant|>"
    assert loaded.tokenizer.decode(encode_prompt(loaded.tokenizer, "hello")) == "hello"


def test_a_stream_adds_up_to_the_answer(loaded):
    pieces = []
    answer = generate(loaded.model, loaded.tokenizer, [chat("hi")], max_new_tokens=12, stream=pieces.append)
    assert "".join(pieces) == answer[0] and pieces
    with pytest.raises(ValueError, match="one prompt"):
        generate(loaded.model, loaded.tokenizer, ["a", "b"], max_new_tokens=2, stream=pieces.append)


def test_every_end_token_stops(loaded, monkeypatch):
    free = generate(loaded.model, loaded.tokenizer, ["abc"], max_new_tokens=6)[0]
    first = loaded.model.generate(
        torch.tensor([encode_prompt(loaded.tokenizer, "abc")]), max_new_tokens=1, do_sample=False
    )[0, -1].item()
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [5, first])
    assert stop_tokens(loaded.model, loaded.tokenizer) == [5, first, loaded.tokenizer.eos_token_id]
    assert free and generate(loaded.model, loaded.tokenizer, ["abc"], max_new_tokens=6) == [""]


def test_an_answer_that_reached_the_limit_is_told_from_one_that_ended(loaded, monkeypatch):
    def cut(limit):
        found = []
        generate(loaded.model, loaded.tokenizer, ["abc", "b"], max_new_tokens=limit, cut_off=found.append)
        return sorted(found)

    assert cut(1) == cut(6) == [0, 1]
    prompt = torch.tensor([encode_prompt(loaded.tokenizer, "abc")])
    third = loaded.model.generate(prompt, max_new_tokens=3, do_sample=False)[0, -3:].tolist()
    ends = third.index(third[-1])  # Where it comes first, which is also where the answer ends.
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", third[-1])
    if ends:
        assert 0 in cut(ends)
    assert 0 not in cut(ends + 1) and 0 not in cut(6)


def test_the_templates_end_of_turn_is_an_end_token(loaded, monkeypatch):
    template = loaded.tokenizer.chat_template.replace("<eos>", "<|system|>")
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    assert loaded.tokenizer.convert_tokens_to_ids("<|system|>") in stop_tokens(loaded.model, loaded.tokenizer)


def test_sampling_follows_its_seed_and_leaves_the_global_generator(loaded):
    def sample(seed):
        return generate(loaded.model, loaded.tokenizer, ["abc"], max_new_tokens=10, temperature=1.0, seed=seed)[0]

    state = torch.get_rng_state()
    first = sample(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == sample(1)
    assert len({first, *(sample(seed) for seed in range(2, 6))}) > 1


def test_the_models_mode_comes_back(loaded):
    loaded.model.train()
    generate(loaded.model, loaded.tokenizer, ["a"], max_new_tokens=1)
    assert loaded.model.training
    loaded.model.eval()
