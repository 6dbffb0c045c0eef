"""An attention that has lost heads equals the one in which they are masked; one that has lost none equals torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.testing import assert_close

import ispasp
from ispasp.errors import InputError
from ispasp.surgery.attention import SlimMultiheadAttention, slim

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
MASKS = ("none", "bool 2d", "float 2d", "bool 3d", "float 3d", "causal")
PADDINGS = ("none", "bool", "float")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "batch_first": True},
    "kdim": {"kdim": 5, "vdim": 7},
    "vdim": {"vdim": 7, "add_bias_kv": True, "add_zero_attn": True, "bias": False, "batch_first": True},
}


def attention(heads: int = 4, size: int = 3, dtype: torch.dtype = torch.float64, **kind: Any) -> nn.MultiheadAttention:
    """With biases that are not zero, as they are after training."""
    made = nn.MultiheadAttention(heads * size, heads, dtype=dtype, **kind).eval()
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


def cut_(module: nn.Module, kept: Sequence[int], heads: int) -> None:
    """Slice the parameters of an attention (or of one around it) in place, as surgery does."""
    packed, single, columns = ("in_proj_",), ("q_proj_weight", "k_proj_weight", "v_proj_weight"), ("out_proj.weight",)
    for name, p in module.named_parameters():
        if name.removeprefix("parametrizations.").startswith(packed):
            p.data = p.data.view(3, heads, -1, *p.shape[1:])[:, kept].flatten(0, 2)
        elif name in single:
            p.data = p.data.view(heads, -1, *p.shape[1:])[kept].flatten(0, 1)
        elif name in (*columns, "bias_k", "bias_v"):
            p.data = p.data.view(*p.shape[:-1], heads, -1)[..., kept, :].flatten(-2)


def slimmed(module: nn.MultiheadAttention, kept: Sequence[int]) -> SlimMultiheadAttention:
    small = copy.deepcopy(module)
    cut_(small, kept, module.num_heads)
    return slim(small, len(kept))


def masked(module: nn.MultiheadAttention, kept: Sequence[int]) -> nn.MultiheadAttention:
    """All heads, of which the output reads only the kept ones."""
    dense = copy.deepcopy(module)
    columns = dense.out_proj.weight.data.view(module.embed_dim, module.num_heads, -1)
    columns[:, [h for h in range(module.num_heads) if h not in kept]] = 0
    return dense


def in_encoders(model: nn.Module, change: Callable[[nn.MultiheadAttention], nn.Module]) -> nn.Module:
    """A copy of the model in which every attention is changed."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(parent, name, change(child))
    return model


@dataclass(frozen=True)
class Call:
    """Arguments for an attention; the masks of a 3D kind have one part for each head."""

    module: nn.MultiheadAttention
    mask: str = "none"
    padding: str = "none"
    batched: bool = True
    B: int = 2
    L: int = 4
    S: int = 5
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def arguments(self, kept: Sequence[int] | None = None) -> dict[str, Any]:
        m, (B, L, S) = self.module, (self.B if self.batched else 1, self.L, self.S)
        S = L if self.mask == "causal" else S
        made: dict[str, Any] = {
            "query": self._input("query", B, L, m.embed_dim),
            "key": self._input("key", B, S, m.kdim),
            "value": self._input("value", B, S, m.vdim),
        }
        heads = range(m.num_heads) if kept is None else kept
        if self.mask == "causal":
            made |= {"attn_mask": torch.ones(L, S).triu(1).bool(), "is_causal": True}
        elif self.mask != "none":
            full = self._mask("attn_mask", self.mask, B, m.num_heads, L, S)
            made["attn_mask"] = full[0, 0] if self.mask.endswith("2d") else full[:, heads].flatten(0, 1)
        if self.padding != "none":
            made["key_padding_mask"] = self._mask("key_padding_mask", self.padding, B, S)
            if not self.batched:
                made["key_padding_mask"] = made["key_padding_mask"][0]
        return made

    def _input(self, name: str, B: int, n: int, width: int) -> Tensor:
        shape = (B, n, width) if self.module.batch_first else (n, B, width)
        x = self.tensors.setdefault(name, torch.randn(shape, dtype=self.module.out_proj.weight.dtype))
        return x if self.batched else x.squeeze(0 if self.module.batch_first else 1)

    def _mask(self, name: str, kind: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            made = torch.rand(shape) > 0.6
            made[..., 0] = False  # no row without any key: its softmax is not a number
            floating = torch.randn(shape, dtype=self.module.out_proj.weight.dtype)
            self.tensors[name] = floating.masked_fill(made, -torch.inf) if kind.startswith("float") else made
        return self.tensors[name]


def assert_equal(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    tolerance = TOLERANCE[expected[0].dtype]
    assert (found[1] is None) == (expected[1] is None)
    assert found[0].is_contiguous()  # a caller may view it
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            assert_close(a, b, atol=tolerance, rtol=tolerance)


def check(call: Call, kept: Sequence[int], need_weights: bool) -> None:
    """Removal equals masking, and without removal the module equals torch's."""
    options: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": False}
    whole = slimmed(call.module, range(call.module.num_heads))
    for average in (False, True):
        both = call.arguments() | options | {"average_attn_weights": average}
        assert_equal(whole(**both), call.module(**both))
    output, weights = masked(call.module, kept)(**call.arguments(), **options)
    if weights is not None:
        weights = weights[..., kept, :, :]
    assert_equal(slimmed(call.module, kept)(**call.arguments(kept), **options), (output, weights))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_removing_heads_equals_masking_them(kind: str, mask: str, padding: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for batched, need_weights in itertools.product((True, False), repeat=2):
        module = attention(dtype=dtype, **KINDS[kind])
        check(Call(module, mask, padding, batched), kept=[0, 2, 3], need_weights=need_weights)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@settings(max_examples=200)
@given(st.data())
def test_any_sizes_heads_and_settings(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    heads = data.draw(st.integers(1, 5))
    kept = sorted(data.draw(st.sets(st.integers(0, heads - 1), min_size=1)))
    flags = ("bias", "batch_first", "add_bias_kv", "add_zero_attn")
    kind: dict[str, Any] = {flag: data.draw(st.booleans(), label=flag) for flag in flags}
    kind |= {name: data.draw(st.none() | st.integers(1, 6), label=name) for name in ("kdim", "vdim")}
    module = attention(heads, data.draw(st.integers(1, 4)), **kind)
    B, L, S = (data.draw(st.integers(1, 5)) for _ in "BLS")
    mask, padding = data.draw(st.sampled_from(MASKS)), data.draw(st.sampled_from(PADDINGS))
    check(Call(module, mask, padding, data.draw(st.booleans()), B, L, S), kept, data.draw(st.booleans()))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [2, 3])
def test_self_attention_equals_the_fused_kernel_of_torch(heads: int, mask: str, need_weights: bool) -> None:
    torch.manual_seed(0)
    module = attention(heads, batch_first=True)
    call = Call(module, mask, S=4)
    x = call.arguments().pop("query")
    with torch.no_grad():
        arguments = call.arguments() | {"query": x, "key": x, "value": x, "need_weights": need_weights}
        assert_equal(slimmed(module, range(heads))(**arguments), module(**arguments))
        del arguments["need_weights"]
        expected = masked(module, [1])(**arguments)[0]
        arguments |= call.arguments([1]) | {"query": x, "key": x, "value": x}
        assert_equal((slimmed(module, [1])(**arguments)[0], None), (expected, None))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_that_of_torch(kind: str, need_weights: bool) -> None:
    module = attention(dropout=0.4, **KINDS[kind]).train()
    arguments = Call(module, "float 2d").arguments() | {"need_weights": need_weights}
    found = []
    for each in (slimmed(module, range(4)), module):
        torch.manual_seed(1)
        found.append(each(**arguments))
    assert_equal(*found)
    small = slimmed(module, [0, 3])
    assert not torch.equal(small(**arguments)[0], small(**arguments)[0])
    assert torch.equal(small.eval()(**arguments)[0], small(**arguments)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_slices_of_the_masked_ones(kind: str) -> None:
    torch.manual_seed(0)
    module, kept = attention(**KINDS[kind]), [1, 3]
    dense, small = masked(module, kept), slimmed(module, kept)
    call = Call(module, "bool 2d")
    for each in (dense, small):
        output, _ = each(**call.arguments())
        output.sin().sum().backward()
    for p in dense.parameters():
        assert p.grad is not None
        p.data = p.grad
    cut_(dense, kept, 4)
    for p, expected in zip(small.parameters(), dense.parameters(), strict=True):
        assert_close(p.grad, expected.data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_parameters_under_the_same_names(kind: str) -> None:
    module = attention(**KINDS[kind])
    names, parameters, seen = list(module.state_dict()), list(module.parameters()), []
    parameters[0].requires_grad_(False)
    module.register_buffer("extra", torch.ones(1), persistent=False)
    module.note = "kept"  # type: ignore[assignment]
    module.register_forward_hook(lambda m, args, output: seen.append(m))
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(m), with_kwargs=True)
    cut_(module, [0, 2], 4)
    small = slim(module, 2)

    assert list(small.state_dict()) == names
    assert all(a is b for a, b in zip(small.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in small.parameters()] == [False] + [True] * (len(parameters) - 1)
    assert small.out_proj is module.out_proj
    assert (small.out_proj.in_features, small.out_proj.out_features) == (6, 12)
    assert not small.training
    assert slim(module.train(), 2).training
    assert (small.embed_dim, small.num_heads, small.head_dim) == (12, 2, 3)
    for name in ("kdim", "vdim", "batch_first", "dropout", "add_zero_attn", "extra", "note"):
        assert getattr(small, name) is getattr(module, name)
    small(**Call(attention(**KINDS[kind])).arguments())
    assert seen == [small, small]
    small.register_buffer("mine", torch.ones(1))
    assert not hasattr(module, "mine")

    copied = copy.deepcopy(small)
    copied.load_state_dict(small.state_dict())
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in parameters}


def test_a_compiled_module_is_not_called_in_place_of_the_slim_one() -> None:
    module = attention()
    module.compile(backend="eager")
    cut_(module, [0, 2], 4)
    assert slim(module, 2)._compiled_call_impl is None


def test_heads_can_be_removed_again() -> None:
    module = attention()
    once = slimmed(module, [0, 1, 3])
    cut_(once, [0, 2], 3)
    twice = slim(once, 2)
    arguments = Call(module).arguments() | {"need_weights": False}
    assert_equal(twice(**arguments), masked(module, [0, 3])(**arguments))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, weight_norm], ids=["parametrization", "hook"])
def test_weight_norm_works_on(norm: Callable[..., nn.MultiheadAttention]) -> None:
    module = attention()
    arguments = Call(module).arguments()
    expected = masked(module, [0, 3])(**arguments)[0].detach()
    with torch.no_grad():  # no graph of the uncut weight
        norm(module, "in_proj_weight")
    cut_(module, [0, 3], 4)
    small = slim(module, 2)
    found = small(**arguments)[0]
    found.sum().backward()
    assert_close(found, expected)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    if parametrize.is_parametrized(small):
        assert_close(copy.deepcopy(small)(**arguments)[0], expected)
        parametrize.remove_parametrizations(small, "in_proj_weight")
        assert type(small) is SlimMultiheadAttention
        assert_close(small(**arguments)[0], expected)


@pytest.mark.parametrize(
    ("kind", "need_weights", "strict"),
    [("plain", False, True), *itertools.product(("plain", "batch first", "vdim"), (True, False), (False,))],
)
def test_it_exports_with_any_batch_size(kind: str, need_weights: bool, strict: bool) -> None:
    module = attention(**KINDS[kind])
    small, batch = slimmed(module, [0, 3]), torch.export.Dim("batch", min=2, max=64)
    axis = 0 if module.batch_first else 1
    dynamic = {name: {axis: batch} for name in ("query", "key", "value")} | {"key_padding_mask": {0: batch}}
    dynamic |= {"need_weights": None}  # type: ignore[dict-item]
    arguments = Call(module, padding="bool", B=3).arguments() | {"need_weights": need_weights}
    program = torch.export.export(small, (), arguments, dynamic_shapes=dynamic, strict=strict).module()
    others = Call(module, padding="bool", B=7).arguments() | {"need_weights": need_weights}
    assert_equal(program(**others), small(**others))


def pair(model: nn.Module, kept: Sequence[int]) -> tuple[nn.Module, nn.Module]:
    """The model with fewer heads, and with masked ones."""
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return in_encoders(model, lambda m: slimmed(m, kept)), in_encoders(model, lambda m: masked(m, kept))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_encoder_layer(train: bool, batch_first: bool, norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        12, 4, 16, 0.0, activation, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    small, dense = pair(layer.train(train), kept=[0, 2])
    x = torch.randn(5, 5, 12, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4, 1, 2]).unsqueeze(1)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    options: list[dict[str, Any]] = [{}, {"src_mask": causal}, {"src_mask": causal, "is_causal": True}]
    options += [{"src_key_padding_mask": padding}]
    for grad, arguments in itertools.product((True, False), options):
        with torch.set_grad_enabled(grad):
            assert_close(small(x, **arguments), dense(x, **arguments), atol=1e-10, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_decoder_layer_and_transformer(train: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    x, y = torch.randn(3, 3, 12, dtype=torch.float64), torch.randn(3, 3, 12, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    padding = torch.tensor([[False, False, True]] * 3)
    options = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    models = (nn.TransformerDecoderLayer(12, 4, 16, **sizes), nn.Transformer(12, 4, 2, 2, 16, **sizes))
    for model, grad in itertools.product(models, (True, False)):
        small, dense = pair(model.train(train), kept=[1, 2])
        with torch.set_grad_enabled(grad):
            assert_close(small(x, y, **options), dense(x, y, **options), atol=1e-10, rtol=1e-10)


class Padded(nn.Module):
    """A classifier of tokens; zeros are padding, which every head is told to skip."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids.eq(0)))
        return out


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("nested", [True, False])
def test_a_padding_mask_leaves_heads_free(nested: bool) -> None:
    model = Padded(nested).eval()
    ids = torch.randint(1, 30, (6, 7), generator=torch.Generator().manual_seed(0))
    ids[::2, 4:] = 0
    plan = ispasp.prune(model, [ids], 0.5, compensate=None, progress=False).plan
    names = [f"encoder.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "linear1")]
    assert {name: len(kept) for name, kept in plan.kept.items()} == dict(zip(names, (2, 6, 2, 6), strict=True))
    small = ispasp.apply_(copy.deepcopy(model), plan, ids)
    for name in names:
        attention = name.endswith("self_attn")
        reader = model.get_submodule(f"{name}.out_proj" if attention else name.replace("linear1", "linear2"))
        units = 4 if attention else 12
        gone = [n for n in range(units) if n not in plan.kept[name]]
        reader.weight.data.view(8, units, -1)[:, gone] = 0
    for grad in (True, False):  # torch takes its fast path without gradients
        with torch.set_grad_enabled(grad):
            assert_close(small(ids)[ids != 0], model(ids)[ids != 0])


@pytest.mark.parametrize("kept", [[0, 2], [1], [0, 1, 3], [0, 1, 2, 3]], ids=len)
@pytest.mark.parametrize("slim_layers", [(0, 1, 2), (0,), (1,)], ids=str)
def test_encoder_with_nested_tensors(
    slim_layers: tuple[int, ...], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 16, activation="gelu", batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(12, dtype=torch.float64)).eval()
    small, dense = pair(encoder, kept)
    for i in set(range(3)) - set(slim_layers):
        small.layers[i] = dense.layers[i]  # type: ignore[index, operator]
    x = torch.randn(4, 5, 12, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4, 1]).unsqueeze(1)  # left aligned: the encoder nests it
    with torch.no_grad():
        expected = [dense(x, src_key_padding_mask=padding), dense(x), dense(x, torch.ones(5, 5).triu(1).bool())]
        calls = {"_transformer_encoder_layer_fwd": 0, "_nested_tensor_from_mask": 0}
        for name in calls:
            monkeypatch.setattr(torch, name, counting(calls, name, getattr(torch, name)))
        found = [small(x, src_key_padding_mask=padding), small(x), small(x, torch.ones(5, 5).triu(1).bool())]
    assert calls == {"_transformer_encoder_layer_fwd": 3 * (3 - len(slim_layers)), "_nested_tensor_from_mask": 1}
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, atol=1e-10, rtol=1e-10)


def counting(calls: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("need_weights", [True, False])
def test_nested_cross_attention(need_weights: bool) -> None:
    small = slimmed(attention(batch_first=True, kdim=5, vdim=7), [0, 3])
    lengths, widths = ((2, 4), (3, 1), (3, 1)), (12, 5, 7)
    parts = [[torch.randn(n, w, dtype=torch.float64) for n in ns] for ns, w in zip(lengths, widths, strict=True)]
    output, weights = small(*(torch.nested.as_nested_tensor(x) for x in parts), need_weights=need_weights)
    for i, (y, x) in enumerate(zip(output.unbind(), zip(*parts, strict=True), strict=True)):
        expected, alone = small(*x, need_weights=True)
        assert_close(y, expected)
        if weights is not None:
            assert_close(weights[i, : alone.shape[0], : alone.shape[1]], alone)
    query = torch.nested.as_nested_tensor(parts[0])
    with pytest.raises(InputError, match=r"\[True, False, False\].*nested tensors need all three"):
        small(query, parts[1][0], parts[2][0])


def test_autocast() -> None:
    module = attention(dtype=torch.float32, batch_first=True)
    small, arguments = slimmed(module, range(4)), Call(module, "bool 2d", "bool").arguments()
    for need_weights in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (m(**arguments, need_weights=need_weights)[0] for m in (small, module))
        assert found.dtype == expected.dtype == torch.bfloat16
        assert_close(found, expected, atol=2e-2, rtol=2e-2)


class _Other(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def _patched() -> nn.MultiheadAttention:
    module = attention()
    module.forward = lambda *args: args  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("module", "heads", "says"),
    [
        (_Other(8, 2), 2, "_Other has a forward of its own"),
        (_patched(), 4, "leave it dense"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(module: nn.MultiheadAttention, heads: int, says: str) -> None:
    before = dict(vars(module))
    with pytest.raises(InputError, match=says):
        slim(module, heads)
    assert vars(module) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_mask": torch.zeros(8, 4, 5)}, r"shape \(8, 4, 5\); expected \(4, 4, 5\) with the heads that are left"),
        ({"attn_mask": torch.zeros(5, 4)}, r"attn_mask has shape \(5, 4\); expected \(4, 5\)"),
        ({"attn_mask": torch.zeros(4, 5).int()}, "attn_mask is torch.int32"),
        ({"key_padding_mask": torch.zeros(5, 2)}, r"key_padding_mask has shape \(5, 2\); expected \(2, 5\)"),
        ({"is_causal": True}, "pass the causal mask"),
        ({"query": torch.zeros(4, 1, 12).double()}, "do not go together with batch_first=False"),
        ({"value": torch.zeros(4, 2, 12).double()}, "one value for each key"),
        ({"query": torch.zeros(4, 12).double()}, "do not go together"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    module = attention()
    with pytest.raises(InputError, match=says):
        slimmed(module, [0, 3])(**(Call(module).arguments() | change))
