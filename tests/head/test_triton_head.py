"""The GPU head against the formula in fp64, its kernel in triton's interpreter where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longtune.head import fused, matrix, online
from longtune.head.form import HeadForm, read_form
from longtune.head.fused import FusedChunked
from longtune.head.heads import Reference
from longtune.head.online import OnlineHead
from longtune.model.packed import Format, PackedEmbedding, PackedLinear, TiedHead
from longtune.model.stack import Stack
from tests import support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {
    "plain": {},
    "all": {"bias": True, "scale": 0.4, "softcap": 2.0},
}
# One row shorter than a kernel's block, one of several blocks with an odd rest.
SIZES = [(7, 50, 16), (5, 4099, 24), (1, 3, 8)]


def draw(dtype, size, bias=False, scale=1.0, softcap=None):
    M, V, H = size
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    form = HeadForm(make(V, H), make(V) if bias else None, scale, softcap)
    token = torch.randint(V, (M,), generator=generator).to(DEVICE)
    cotangent = torch.randn(M, generator=generator).to(DEVICE)
    return form, make(M, H), token, cotangent


def draw_packed(bits, group):
    generator = torch.Generator().manual_seed(3)
    V, H = 300, 128
    format = Format("affine", bits, group)
    words = torch.randint(-(2**31), 2**31, (V, format.words(H)), generator=generator).to(torch.int32)
    scales, biases = (torch.randn(V, H // group, generator=generator) * 0.05 for _ in range(2))
    packed = PackedLinear(format, H, words, scales, biases, compute_dtype=torch.float32).to(DEVICE)
    hidden = torch.randn(5, H, generator=generator).to(DEVICE)
    token = torch.randint(V, (5,), generator=generator).to(DEVICE)
    return packed, hidden, token, torch.randn(5, generator=generator).to(DEVICE)


def double(form: HeadForm) -> HeadForm:
    bias = None if form.bias is None else form.bias.double()
    return HeadForm(form.weight.double(), bias, form.scale, form.softcap)


def error(ours, truth):
    return float(torch.linalg.norm(ours.double() - truth) / torch.linalg.norm(truth).clamp(min=1e-6))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("settings", [FORMS["plain"], FORMS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize(
    "dtype, wide",
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=str,
)
def test_no_further_from_fp64_than_autograd(settings, size, dtype, wide):
    form, hidden, token, cotangent = draw(dtype, size, **settings)
    truth_lp, truth_d, _ = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
    plain_lp, plain_d, _ = Reference(form).backward(hidden, token, cotangent)
    log_probs, dhidden, grads = FusedChunked(form, 4, wide=wide).backward(hidden, token, cotangent)
    assert grads == [] and log_probs.dtype == torch.float32 and dhidden.dtype == dtype
    small = 3e-6 if dtype == torch.float32 else 0.3 * torch.finfo(dtype).eps
    assert error(log_probs, truth_lp) <= 1.2 * error(plain_lp, truth_lp) + small
    assert error(dhidden, truth_d) <= 1.2 * error(plain_d, truth_d) + small
    if wide:
        assert error(log_probs, truth_lp) <= 1e-6
    assert torch.equal(FusedChunked(form, 4, wide=wide).log_probs(hidden, token), log_probs)


@pytest.mark.usefixtures("poisoned_empty")
def test_a_target_without_weight_has_no_gradient():
    form, hidden, token, cotangent = draw(torch.float32, (7, 50, 16))
    cotangent[2:4] = 0
    log_probs, dhidden, _ = FusedChunked(form, None).backward(hidden, token, cotangent)
    assert float(dhidden[2:4].abs().max()) == 0
    assert bool(log_probs.isfinite().all())


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_far_apart_stay_finite(dtype):
    form, hidden, token, cotangent = draw(dtype, (7, 50, 16))
    form = HeadForm(form.weight * 60, None, softcap=None)
    full = double(form)
    truth_lp, truth_d, _ = Reference(full).backward(hidden.double(), token, cotangent.double())
    log_probs, dhidden, _ = FusedChunked(form, None, wide=True).backward(hidden, token, cotangent)
    assert error(log_probs, truth_lp) < 1e-5 and error(dhidden, truth_d) < (1e-5 if dtype == torch.float32 else 2e-3)
    capped = HeadForm(form.weight, None, softcap=0.5)
    log_probs, dhidden, _ = FusedChunked(capped, None).backward(hidden, token, cotangent)
    assert bool(log_probs.isfinite().all()) and bool(dhidden.isfinite().all())


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("settings", [FORMS["plain"], FORMS["all"]], ids=["plain", "all"])
def test_a_trained_matrix_and_bias_get_their_gradients(settings):
    form, hidden, token, cotangent = draw(torch.float32, (7, 50, 16), **settings)
    full = double(form)
    leaves = [p.requires_grad_() for p in (full.weight, full.bias) if p is not None]
    log_probs = Reference(full)._log_probs(hidden.double(), token)
    truth = torch.autograd.grad(log_probs, leaves, cotangent.double())
    for p in (form.weight, form.bias):
        if p is not None:
            p.requires_grad_()
    head = FusedChunked(form, 3)
    assert len(head.parameters) == len(leaves)
    _, _, grads = head.backward(hidden, token, cotangent)
    for ours, expected in zip(grads, truth, strict=True):
        assert ours.dtype == torch.float32 and error(ours, expected) < 2e-6


@pytest.mark.usefixtures("poisoned_empty")
def test_no_token_at_all():
    form, hidden, token, cotangent = draw(torch.float32, (7, 50, 16))
    log_probs, dhidden, _ = FusedChunked(form, 3).backward(hidden[:0], token[:0], cotangent[:0])
    assert log_probs.shape == (0,) and dhidden.shape == (0, 16)


def test_the_buffer_of_logits_is_bounded(monkeypatch):
    monkeypatch.setattr(fused, "LOGITS_BYTES", 4 * 50 * 3)
    form, hidden, token, cotangent = draw(torch.float32, (7, 50, 16))
    head = FusedChunked(form, None)
    assert head._rows(torch.float32) == 3
    truth = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
    found = head.backward(hidden, token, cotangent)
    assert error(found[1], truth[1]) < 2e-6


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("bits, group", [(4, 32), (8, 64), (4, 128), (3, 32)])
def test_a_packed_matrix_gives_what_its_dense_copy_gives(bits, group, monkeypatch):
    monkeypatch.setattr(matrix, "SLICE_BYTES", 0)  # The shortest slices: 128 rows.
    packed, hidden, token, cotangent = draw_packed(bits, group)
    dense = HeadForm(packed.dequantise(torch.float32))
    truth = FusedChunked(dense, None).backward(hidden, token, cotangent)
    found = FusedChunked(HeadForm(packed.weight, packed=packed), None).backward(hidden, token, cotangent)
    assert torch.allclose(found[0], truth[0], atol=1e-5) and torch.allclose(found[1], truth[1], atol=1e-5)


def test_a_trained_head_has_a_form_only_where_asked():
    model = support.clean_llama().requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    stack = Stack(model)
    assert read_form(stack) is None
    form = read_form(stack, trained=True)
    assert form is not None and form.weight is model.lm_head.weight


class TestOnline:
    """Slices of the vocabulary; the sizes are not multiples of any tile's."""

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("columns", [64, 150], ids=["slices", "whole"])
    def test_no_further_from_fp64_than_autograd(self, settings, dtype, columns):
        form, hidden, token, cotangent = draw(dtype, (7, 150, 40), **settings)
        cotangent[2] = 0
        token[3], token[4] = 0, 149
        truth_lp, truth_d, _ = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
        _, plain_d, _ = Reference(form).backward(hidden, token, cotangent)
        head = OnlineHead(form, None, tokens=5, columns=columns)
        log_probs, dhidden, grads = head.backward(hidden, token, cotangent)
        assert grads == [] and dhidden.dtype == dtype and log_probs.dtype == torch.float32
        # Scores are never rounded to the model's dtype.
        assert error(log_probs, truth_lp) <= 1e-6
        small = 3e-6 if dtype == torch.float32 else 0.3 * torch.finfo(dtype).eps
        assert error(dhidden, truth_d) <= 1.2 * error(plain_d, truth_d) + small
        assert torch.equal(head.log_probs(hidden, token), log_probs)
        assert float(dhidden[2].abs().max()) == 0

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_logits_that_rise_from_slice_to_slice(self, dtype):
        """The reference is raised again and again, by more than half precision could hold."""
        form, hidden, token, cotangent = draw(dtype, (6, 90, 32))
        steps = torch.arange(90, device=DEVICE)[:, None] / 3
        form = HeadForm((form.weight * 0.1 + steps * hidden[:1] / hidden[0].norm() ** 2).to(dtype))
        hidden = (hidden * 0.1 + hidden[:1] * torch.tensor([1, 3, 0, -1, -3, 0.5], device=DEVICE)[:, None]).to(dtype)
        truth_lp, truth_d, _ = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
        log_probs, dhidden, _ = OnlineHead(form, None, columns=10).backward(hidden, token, cotangent)
        assert error(log_probs, truth_lp) <= 1e-5
        assert error(dhidden, truth_d) <= (1e-5 if dtype == torch.float32 else 1e-3)

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.parametrize("columns", [20, 50])
    def test_a_model_that_is_sure_of_its_target_or_of_another(self, columns):
        """1 - p and its gradient keep their relative precision, however small."""
        form, _, _, cotangent = draw(torch.float32, (4, 50, 16))
        token = torch.tensor([0, 49, 20, 20], device=DEVICE)
        weight = form.weight / form.weight.norm(dim=1, keepdim=True)
        hidden = weight[torch.tensor([0, 49, 20, 3], device=DEVICE)] * 30
        form = HeadForm(weight)
        truth_lp, truth_d, _ = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
        log_probs, dhidden, _ = OnlineHead(form, None, columns=columns).backward(hidden, token, cotangent)
        for index in range(4):
            assert abs(float(log_probs[index] / truth_lp[index]) - 1) < 3e-5
            ours, truth = dhidden[index].double(), truth_d[index]
            assert float(torch.linalg.norm(ours - truth) / torch.linalg.norm(truth)) < 3e-5

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.parametrize("V", [1, 2])
    def test_the_smallest_vocabularies(self, V):
        form, hidden, _, cotangent = draw(torch.float32, (3, V, 8))
        token = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        truth_lp, truth_d, _ = Reference(double(form)).backward(hidden.double(), token, cotangent.double())
        log_probs, dhidden, _ = OnlineHead(form, None, columns=1).backward(hidden, token, cotangent)
        assert torch.allclose(log_probs.double(), truth_lp, atol=1e-6)
        assert torch.allclose(dhidden.double(), truth_d, atol=1e-6)

    def test_no_target_at_all(self):
        form, hidden, token, cotangent = draw(torch.float32, (7, 50, 16))
        log_probs, dhidden, _ = OnlineHead(form, 3).backward(hidden[:0], token[:0], cotangent[:0])
        assert log_probs.shape == (0,) and dhidden.shape == (0, 16)

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # numpy, in triton's interpreter
    @pytest.mark.parametrize("what", ["hidden", "weight"])
    def test_what_is_not_finite_shows(self, what):
        form, hidden, token, cotangent = draw(torch.float32, (3, 50, 16))
        token[:] = 7
        (hidden[1] if what == "hidden" else form.weight[40])[0] = float("nan")
        log_probs, dhidden, _ = OnlineHead(form, None, columns=16).backward(hidden, token, cotangent)
        wrong = slice(1, 2) if what == "hidden" else slice(None)
        assert bool(log_probs[wrong].isnan().all()) and bool(dhidden[wrong].isnan().all(1).all())

    @pytest.mark.usefixtures("poisoned_empty")
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("bits, group", [(4, 32), (8, 64), (4, 128), (2, 32), (3, 32)])
    def test_a_packed_matrix_gives_what_its_dense_copy_gives(self, bits, group, tied, monkeypatch):
        monkeypatch.setattr(online, "FINISHED", 2)
        packed, hidden, token, cotangent = draw_packed(bits, group)
        dense = HeadForm(packed.dequantise(torch.float32))
        if tied:
            tensors = packed.weight, packed.scales, packed.biases
            packed = TiedHead(PackedEmbedding(packed.format, 128, *tensors, compute_dtype=torch.float32))
        truth = OnlineHead(dense, None, columns=100).backward(hidden, token, cotangent)
        found = OnlineHead(HeadForm(packed.weight, packed=packed), None, columns=100).backward(hidden, token, cotangent)
        assert torch.equal(found[0], truth[0]) and torch.equal(found[1], truth[1])

    def test_a_slice_at_a_time_is_dequantised(self, monkeypatch):
        packed, hidden, token, cotangent = draw_packed(4, 32)
        asked = []
        real = packed.dequantise
        monkeypatch.setattr(packed, "dequantise", lambda *args, **kw: (asked.append(x := real(*args, **kw)), x)[1])
        OnlineHead(HeadForm(packed.weight, packed=packed), None, columns=128).backward(hidden, token, cotangent)
        assert [len(x) for x in asked] == [128, 128, 44, 5]
        assert len({x.data_ptr() for x in asked[:3]}) == 1

    def test_sizes_keep_to_their_bounds(self):
        for V, H in ((128256, 4096), (256000, 2304), (50257, 768), (3, 8)):
            form = HeadForm(torch.empty(V, H, device="meta"))
            for chunk in (None, 1024, 256, 1):
                for count in (1, 127, 128, 5000, 8192, 100000):
                    tokens, columns = OnlineHead(form, chunk).sizes(count)
                    assert 1 <= tokens <= count and 1 <= columns <= min(V, online.COLUMNS)
                    assert tokens * columns * 4 <= online.LOGITS_BYTES
                    assert tokens * H * 4 <= online.SUMS_BYTES
                    assert chunk is None or tokens * columns <= chunk * V
                    assert tokens in (1, count) or tokens % 128 == 0 or chunk in (1, 256)
        assert OnlineHead(HeadForm(torch.empty(128256, 4096, device="meta")), 1024).sizes(8192) == (4096, 8192)
        assert OnlineHead(HeadForm(torch.empty(256000, 2304, device="meta")), None).sizes(8192) == (4096, 8192)

    def test_a_trained_matrix_is_refused(self):
        form = draw(torch.float32, (7, 50, 16))[0]
        form.weight.requires_grad_()
        with pytest.raises(ValueError, match="not trained"):
            OnlineHead(form, None)

    def test_without_values_it_takes_the_memory_that_it_would_take(self):
        """A plan is made on the meta device."""
        form = HeadForm(torch.empty(300, 32, device="meta", dtype=torch.bfloat16))
        hidden = torch.empty(9, 32, device="meta", dtype=torch.bfloat16)
        token, cotangent = torch.empty(9, dtype=torch.int64, device="meta"), torch.empty(9, device="meta")
        log_probs, dhidden, _ = OnlineHead(form, None).backward(hidden, token, cotangent)
        assert log_probs.shape == (9,) and dhidden.shape == (9, 32) and dhidden.dtype == torch.bfloat16
