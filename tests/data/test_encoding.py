"""Where answers begin and end in tokens, for several kinds of tokenizers, against encoding everything anew."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longtune.data.encoding import Draft, Encoder, Mark, common_prefix
from tests.data.support import CHATML, make_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def sentencepiece_like(kind: str) -> Any:
    """Tokenizers that put a blank before words, by Metaspace or by a normaliser (as Llama's first ones do)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "normaliser":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Metaspace()
    texts = [f"word{i} the answer is {i * 7} and so on,\nsaid user" for i in range(50)]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS[:3], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class Slow:
    """A tokenizer without offsets: what `Encoder` asks of one, over a fast one."""

    is_fast = False

    def __init__(self, inner: Any):
        self._inner = inner
        self.eos_token_id, self.bos_token_id, self.bos_token = inner.eos_token_id, inner.bos_token_id, inner.bos_token

    def __call__(self, text: str, add_special_tokens: bool = False) -> Any:
        return self._inner(text, add_special_tokens=add_special_tokens)


def stripping() -> Any:
    """A byte-level one whose end-of-turn token takes the blanks after it (as Phi's does), and NFC before all."""
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True)])
    tokenizer._tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = {
    "byte-level": make_tokenizer(),
    "byte-level with bos": make_tokenizer(bos=True),
    "stripping": stripping(),
    "metaspace first": sentencepiece_like("first"),
    "metaspace always": sentencepiece_like("always"),
    "normaliser": sentencepiece_like("normaliser"),
    "slow": Slow(make_tokenizer()),
}
PIECES = ["the an", "swer", " ", "\n", "\n\n", "word1", "e\u0301", "日本", "🙂", "a", " is", "<", "|", *SPECIALS[3:]]
PIECE = st.sampled_from(PIECES)
TEXT = st.lists(PIECE, max_size=8).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(prompt=TEXT, answer=TEXT, other=TEXT, special=st.booleans())
def test_answers_begin_at_the_end_of_the_common_prefix(name, prompt, answer, other, special):
    """The shortcut (only the tail behind the last added token) equals encoding the whole prompt."""
    encoder = Encoder(TOKENIZERS[name])
    for told in (prompt, prompt + other):
        draft = Draft(prompt + answer, [Mark(len(prompt), None, prompt=told)], add_special=special)
        bos = TOKENIZERS[name].bos_token
        special_now = special and not (bos and draft.text.startswith(bos))
        (sequence,) = encoder.encode([draft])
        whole, alone = encoder.ids(draft.text, special_now), encoder.ids(told, special_now)
        expected = common_prefix(whole, alone)
        dropped = len(whole) - len(sequence.ids)
        assert sequence.ids.tolist() == whole[dropped:].tolist()
        assert sequence.spans[0].start == max(0, expected - dropped)
        assert sequence.spans[0].end == len(sequence.ids)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "slow"])
@settings(max_examples=100, deadline=None)
@given(before=TEXT, marked=TEXT.filter(bool), after=TEXT)
def test_marked_stretches_take_every_token_they_overlap(name, before, marked, after):
    tokenizer = TOKENIZERS[name]
    text = before + marked + after
    (sequence,) = Encoder(tokenizer).encode([Draft(text, [Mark(len(before), len(before) + len(marked))])])
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    low, high = len(before), len(before) + len(marked)
    expected = [i for i, (start, end) in enumerate(offsets) if start < high and end > low and end > start]
    span = sequence.spans[0]
    covered = [i for i in range(span.start, span.end) if offsets[i][1] > offsets[i][0]]
    assert covered == expected


def test_batches_do_not_inherit_truncation_or_padding():
    tokenizer = make_tokenizer()
    tokenizer("some words here", truncation=True, max_length=2, padding="max_length")
    sequences = Encoder(tokenizer).encode([Draft("some words here"), Draft("x")])
    assert [len(sequence.ids) for sequence in sequences] == [
        len(tokenizer("some words here")["input_ids"]),
        len(tokenizer("x")["input_ids"]),
    ]


def test_eos_is_appended_once_and_trained():
    encoder = Encoder(make_tokenizer())
    sequences = encoder.encode([Draft(text, [Mark(0)], eos=True) for text in ("the answer", "the answer<|im_end|>")])
    assert np.array_equal(sequences[0].ids, sequences[1].ids)
    assert sequences[0].spans == sequences[1].spans


def test_template_is_rendered_by_the_tokenizers_own(tmp_path):
    """Ids equal `apply_chat_template`'s, whose caller adds no special tokens either."""
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, bos=True)
    talk = [{"role": "user", "content": "q"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    expected = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    assert Encoder(tokenizer).encode([Draft(text)])[0].ids.tolist() == list(expected)
