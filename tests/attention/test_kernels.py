"""Every attention kernel that runs here against explicit fp64 attention, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from longtune.attention import select
from longtune.attention.kernels import CpuFlash, CudaEfficient, CudaFlash, Cudnn, Reference
from longtune.attention.merge import merge, merge_fused

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] >= 9

RUNS = [
    pytest.param(Reference(), "cpu", torch.float64, id="reference-fp64"),
    pytest.param(Reference(score_bytes=1), "cpu", torch.float32, id="reference-fp32-one-query-at-a-time"),
    pytest.param(CpuFlash(), "cpu", torch.float64, id="cpu-flash-fp64"),
    pytest.param(CpuFlash(), "cpu", torch.float32, id="cpu-flash-fp32"),
    pytest.param(CpuFlash(), "cpu", torch.bfloat16, id="cpu-flash-bf16"),
    *(
        pytest.param(kernel, "cuda", dtype, id=f"{kernel.name}-{str(dtype)[6:]}")
        for kernel, runs in ((CudaFlash(), CUDA), (Cudnn(grain=1), HOPPER), (Reference(), CUDA))
        for dtype in (torch.bfloat16, torch.float16)
        if runs
    ),
    *(
        pytest.param(CudaEfficient(), "cuda", dtype, id=f"cuda-efficient-{str(dtype)[6:]}")
        for dtype in (torch.float32, torch.bfloat16)
        if CUDA
    ),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
HEADS = [(4, 4), (8, 2), (8, 1)]


def explicit(q, k, v, mask, scale, softcap=None):
    """Output and log-sum-exp by the formula."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def draw(heads, queries, keys, width, value_width, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(h, t, d):
        return torch.randn(1, h, t, d, generator=generator, dtype=torch.float64).to(dtype).to(device)

    q, k, v = make(heads[0], queries, width), make(heads[1], keys, width), make(heads[1], keys, value_width)
    return q, k, v, make(heads[0], queries, value_width)


def relative(ours, truth):
    """Relative difference; a truth that is all but zero (one token has no dQ) is measured against one."""
    truth = truth.detach().cpu()
    return float(torch.linalg.norm(ours.double().cpu() - truth) / torch.linalg.norm(truth).clamp(min=1.0))


def check(kernel, q, k, v, dout, slack=1.0, **options):
    scale = q.shape[-1] ** -0.5
    mask = options.get("mask")
    if options.get("causal"):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out, lse = explicit(*leaves, mask, scale, options.get("softcap"))
    truth = torch.autograd.grad(out, leaves, dout.double())
    found_out, found_lse = kernel.forward(q, k, v, scale=scale, **options)
    tolerance = TOLERANCE[q.dtype] * slack
    assert found_out.dtype == q.dtype
    assert relative(found_out, out.detach()) < tolerance
    assert float((found_lse.double() - lse.detach()).abs().max()) < max(tolerance, 1e-6) * 4
    found = kernel.backward(dout, q, k, v, found_out, found_lse, scale=scale, **options)
    for name, ours, expected in zip("qkv", found, truth, strict=True):
        assert relative(ours, expected) < tolerance, name


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel, device, dtype", RUNS)
class TestAgainstFp64:
    @pytest.mark.parametrize("width", [64, 128])
    def test_rectangle(self, kernel, device, dtype, heads, width):
        check(kernel, *draw(heads, 33, 71, width, width, dtype, device))

    def test_square_is_causal(self, kernel, device, dtype, heads):
        check(kernel, *draw(heads, 65, 65, 64, 64, dtype, device), causal=True)

    def test_one_token(self, kernel, device, dtype, heads):
        kernel = Cudnn() if kernel.name == "cudnn" else kernel
        # Its dQ is the difference of two equal numbers: of products of three tf32 each, where the kernel makes those.
        slack = 3.0 if kernel.name == "cuda-efficient" else 1.0
        check(kernel, *draw(heads, 1, 1, 64, 64, dtype, device), slack, causal=True)

    def test_values_narrower_than_keys(self, kernel, device, dtype, heads):
        check(kernel, *draw(heads, 17, 40, 96, 64, dtype, device))

    def test_mask(self, kernel, device, dtype, heads):
        distance = torch.arange(40, 70)[:, None] - torch.arange(70)[None]
        mask = ((distance >= 0) & (distance < 12)).to(device)
        check(kernel, *draw(heads, 30, 70, 64, 64, dtype, device), mask=mask)

    def test_softcap(self, kernel, device, dtype, heads):
        if not kernel.supports_softcap:
            pytest.skip(f"{kernel.name} has no softcap; the reference takes its place")
        check(kernel, *draw(heads, 20, 20, 64, 64, dtype, device), causal=True, softcap=1.5)


@pytest.mark.skipif(not HOPPER, reason="needs cuDNN on compute capability 9")
@pytest.mark.parametrize("heads", HEADS)
def test_cudnn_hands_odd_blocks_on(heads):
    for queries, keys in ((512, 1024), (512, 1000), (511, 512), (1, 512)):
        check(Cudnn(), *draw(heads, queries, keys, 128, 128, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_of_memory_efficient_attention(heads, causal):
    """Without a GPU its shapes are still torch's own."""
    q, k, v, dout = (x.to("meta") for x in draw(heads, 37, 37 if causal else 70, 64, 48, torch.float32, "cpu"))
    out, lse = CudaEfficient().forward(q, k, v, scale=0.1, causal=causal)
    assert out.shape == dout.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    found = CudaEfficient().backward(dout, q, k, v, out, lse, scale=0.1, causal=causal)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("kernel, device, dtype", RUNS)
def test_layout_of_the_output_gradient_does_not_matter(kernel, device, dtype):
    """Both layouts in both orders, after plain SDPA of the same shape: no cached graph may be reused wrongly."""
    for heads in HEADS:
        for order in ((0, 1), (1, 0)):
            q, k, v, dout = draw(heads, 64, 64, 64, 64, dtype, device, seed=order[0])
            leaf = q.clone().requires_grad_()
            plain = torch.nn.functional.scaled_dot_product_attention(leaf, k, v, is_causal=True, enable_gqa=True)
            plain.backward(dout)
            layouts = (dout.contiguous(), dout.transpose(1, 2).contiguous().transpose(1, 2))
            for index in order:
                check(kernel, q, k, v, layouts[index], causal=True)


@pytest.mark.parametrize("kernel, device, dtype", RUNS)
def test_blocks_merge_exactly(kernel, device, dtype):
    """The backward of each block, given the merged output and log-sum-exp, is its share of the whole gradient."""
    q, k, v, dout = draw((8, 2), 32, 96, 64, 64, dtype, device)
    whole = [x.double().clone().requires_grad_() for x in (q, k, v)]
    truth_out, _ = explicit(*whole, None, 0.125)
    truth = torch.autograd.grad(truth_out, whole, dout.double())
    blocks = [slice(0, 50), slice(50, 51), slice(51, 96)]
    out = lse = None
    for block in blocks:
        o, l = kernel.forward(q, k[:, :, block], v[:, :, block], scale=0.125)
        out, lse = (o, l) if out is None else merge(out, lse, o, l, last=block is blocks[-1])
    parts = [kernel.backward(dout, q, k[:, :, block], v[:, :, block], out, lse, scale=0.125) for block in blocks]
    found = (
        sum(p[0].double() for p in parts),
        torch.cat([p[1] for p in parts], 2),
        torch.cat([p[2] for p in parts], 2),
    )
    for ours, expected in zip(found, truth, strict=True):
        assert relative(ours, expected) < TOLERANCE[dtype] * 1.5


class TestChoice:
    """What `select` puts beside the block kernel, without a GPU."""

    def names(self, name, device="cuda", dtype=torch.bfloat16):
        return [kernel.name for kernel, _ in select.path_kernels(torch.device(device), dtype, name)]

    def test_on_cuda_whole_chunks_are_taken_by_triton_and_flash(self, monkeypatch):
        monkeypatch.setattr(select, "triton_fault", lambda device: None)
        assert self.names("cudnn") == self.names("cuda-flash") == ["triton", "flash-varlen"]

    def test_fp32_on_cuda_is_fused_too(self, monkeypatch):
        monkeypatch.setattr(select, "triton_fault", lambda device: None)
        assert self.names("cuda-efficient") == ["triton"]
        for capability, name in (((9, 0), "cuda-efficient"), ((8, 0), "cuda-efficient"), ((7, 5), "reference")):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            choice = select.choose(torch.device("cuda"), torch.float32)
            assert choice.name == name and ("float32" in choice.reason or "fp32" in choice.reason)
            assert select.choose(torch.device("cuda"), torch.float64).name == "reference"
        monkeypatch.setattr(select, "triton_fault", lambda device: "no compiler")
        assert self.names("cuda-efficient") == []

    def test_without_triton_flash_takes_packed_rows_too(self, monkeypatch):
        monkeypatch.setattr(select, "triton_fault", lambda device: "no compiler")
        assert self.names("cudnn") == ["flash-varlen"]

    def test_elsewhere_nothing_is_added(self):
        assert self.names("cpu-flash", "cpu") == self.names("reference", "cuda") == self.names("reference", "cpu") == []

    def test_blocks_are_merged_by_triton_where_it_runs(self, monkeypatch):
        for fault, merged in ((None, merge_fused), ("no compiler", merge)):
            monkeypatch.setattr(select, "triton_fault", lambda device, found=fault: found)
            for name in ("cudnn", "cuda-flash", "cuda-efficient"):
                assert select.path_attention(torch.device("cuda"), torch.bfloat16, name)[0].merge is merged
            assert select.path_attention(torch.device("cpu"), torch.float32)[0].merge is merge

    def test_a_kernel_asked_for_by_name_is_the_only_one(self):
        attention, choice = select.path_attention(torch.device("cpu"), torch.float32, "reference")
        assert attention.paths == () and choice.reason == "asked for"

    def test_a_triton_that_does_not_run_is_said_and_not_used(self, monkeypatch):
        pytest.importorskip("triton")
        from longtune.attention import triton_path
        from longtune.head import select as head_select
        from longtune.head import triton_logits
        from longtune.model import lora_kernels, triton_here

        def broken(device):
            raise RuntimeError("Failed to find C compiler.\nSecond line")

        rooms = ((select, triton_path), (head_select, triton_logits), (triton_here, lora_kernels))
        for module, owner in rooms:
            monkeypatch.setattr(owner, "probe", broken)
            module.triton_fault.cache_clear()
            fault = module.triton_fault(torch.device("cuda", 7))
            assert fault is not None and fault.endswith("(RuntimeError: Failed to find C compiler.)")

    def test_the_probes_of_all_rooms_run(self):
        pytest.importorskip("triton")
        from longtune.attention import triton_path
        from longtune.head import triton_logits
        from longtune.model import lora_kernels

        for probe in (triton_path.probe, triton_logits.probe, lora_kernels.probe):
            probe(torch.device("cuda" if CUDA else "cpu"))
