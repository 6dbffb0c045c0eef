"""Save and load: what comes back is what was saved, and what cannot come back says so."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import ispasp
from ispasp import files
from ispasp._store import load, save
from ispasp.errors import InputError, IspaspError, MissingExtraError, PlanError, SaveError
from ispasp.surgery.attention import SlimMultiheadAttention
from ispasp.surgery.verify import output_of
from ispasp.types.plan import Plan
from support.forge import Change, forge_model


class Net(nn.Module):
    """A small CNN: BatchNorm statistics, a skip, depthwise convolution, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.depthwise(self.expand(x)))
        return self.fc2(self.fc1(x.mean((2, 3))).relu())


class TiedLM(nn.Module):
    """Embedding and output layer share one parameter; positions are a buffer that is not saved."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        return self.head(x + self.down(self.up(x).relu()))


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def huggingface(name: str, **more: Any) -> nn.Module:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision = pytest.importorskip("ispasp.integrations.torchvision").import_torchvision
    with contextlib.suppress(ImportError):
        import_torchvision()
    import transformers

    from ispasp_lab.zoo.tiny import DECODER, ENCODER

    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**(ENCODER if name.startswith("Bert") else DECODER), **more}))


def bert() -> nn.Module:
    return huggingface("BertForSequenceClassification")


def llama() -> nn.Module:
    return huggingface("LlamaForCausalLM", tie_word_embeddings=True)


IDS = torch.arange(16).view(2, 8)
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "cnn": (Net, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
    "tied_lm": (TiedLM, IDS),
    "weight_norm": (normed(weight_norm), torch.ones(2, 4)),
    "weight_norm_parametrized": (normed(parametrizations.weight_norm), torch.ones(2, 4)),
    "attention": (Attention, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))),
    "encoder": (encoder, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))),
    "bert": (bert, TEXT),
    "llama": (llama, {"input_ids": IDS, "use_cache": False}),
}


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().eval()
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    return model


_PLANS: dict[str, Plan] = {}


def pruned(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Plan]:
    build, batch = MODELS[name]
    model = seeded(build, 0)
    if name not in _PLANS:
        found = ispasp.survey(model, batch)
        _PLANS[name] = found.plan({d.name: range(d.units // 2, d.units) for d in found.dimensions})
    return ispasp.apply_(model, _PLANS[name]).to(dtype), _PLANS[name]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that an undone load must have restored."""
    return {
        "tensors": {
            n: (id(t), t.data.clone(), t.dtype) for n, t in [*model.named_parameters(), *model.named_buffers()]
        },
        "modules": [(n, id(m)) for n, m in model.named_modules()],
        "attributes": [
            {k: v for k, v in vars(m).items() if isinstance(v, (int, float, str, tuple))} for m in model.modules()
        ],
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    tensors = a["tensors"].keys() == b["tensors"].keys() and all(
        x[0] == y[0] and x[2] == y[2] and torch.equal(x[1], y[1])
        for x, y in zip(a["tensors"].values(), b["tensors"].values(), strict=True)
    )
    return tensors and a["modules"] == b["modules"] and a["attributes"] == b["attributes"]


def assert_same_outputs(a: nn.Module, b: nn.Module, batch: Any) -> None:
    for x, y in zip(output_of(a, batch), output_of(b, batch), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    model, plan = pruned(name)
    dense = seeded(MODELS[name][0], 1)
    with monkeypatch.context() as patch:
        for where, attribute in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "loads")):
            patch.setattr(where, attribute, refuse)
        patch.setattr(pickle, "dump", refuse)
        patch.setattr(pickle, "Unpickler", refuse)
        folder = save(model, tmp_path / "new" / "folder", plan=plan)
        loaded = load(folder, dense)
    assert loaded is dense
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in model.state_dict().items())
    assert_same_outputs(loaded, model, MODELS[name][1])
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in MODELS[name][0]().parameters())
    assert not list(folder.glob(".*")), "temporary files are gone"


@pytest.mark.parametrize("name", ["cnn", "tied_lm", pytest.param("bert", marks=pytest.mark.long), "llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_of_the_file_is_taken_over(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, plan = pruned(name, dtype)
    batch = MODELS[name][1]
    loaded = load(save(model, tmp_path, plan=plan), seeded(MODELS[name][0], 1))
    before = {n: t.dtype for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert {n: t.dtype for n, t in [*loaded.named_parameters(), *loaded.named_buffers()]} == before
    assert_same_outputs(loaded, model, batch.to(dtype) if name == "cnn" else batch)


def test_files_are_safetensors_and_json(tmp_path: Path) -> None:
    model, plan = pruned("tied_lm")
    save(model, tmp_path, plan=plan)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "plan.json"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in tensors, "tied tensors are stored once"
    assert "scale" not in tensors, "buffers that are not persistent are not stored"
    assert tensors.keys() == model.state_dict().keys() - {"head.weight"}
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    for file in tmp_path.iterdir():
        assert not file.read_bytes().startswith((b"\x80", b"PK"))


def test_ties_are_restored(tmp_path: Path) -> None:
    model, plan = pruned("tied_lm")
    save(model, tmp_path, plan=plan)
    for tied in (True, False):
        loaded = load(tmp_path, TiedLM(tied))
        assert loaded.head.weight is loaded.embed.weight  # type: ignore[union-attr]
        assert_same_outputs(loaded, model, IDS)


def test_model_that_ties_what_the_file_does_not_is_refused(tmp_path: Path) -> None:
    untied = TiedLM(tied=False)
    plan = ispasp.survey(untied, IDS).plan(0.5)
    save(ispasp.apply_(untied, plan), tmp_path, plan=plan)
    dense = TiedLM()
    before = snapshot(dense)
    with pytest.raises(SaveError, match="tied in the model"):
        load(tmp_path, dense)
    assert same(snapshot(dense), before)


def test_attention_modules_are_swapped_by_load(tmp_path: Path) -> None:
    model, plan = pruned("encoder")
    loaded = load(save(model, tmp_path, plan=plan), encoder())
    kinds = [type(m) for m in loaded.modules()]
    assert SlimMultiheadAttention in kinds
    assert nn.MultiheadAttention not in kinds


def test_requires_grad_and_mode_are_the_models(tmp_path: Path) -> None:
    model, plan = pruned("cnn")
    save(model, tmp_path, plan=plan)
    dense = Net().train()
    dense.fc1.weight.requires_grad_(False)
    load(tmp_path, dense)
    assert dense.training
    assert [n for n, p in dense.named_parameters() if not p.requires_grad] == ["fc1.weight"]
    dense(MODELS["cnn"][1]).sum().backward()
    assert dense.fc2.weight.grad.shape == dense.fc2.weight.shape  # type: ignore[union-attr]


def test_views_of_one_storage(tmp_path: Path) -> None:
    model, plan = pruned("weight_norm_parametrized")
    both = torch.arange(8.0)
    model[4].bias.data = both[:2]
    model[2].bias.data = both[2:5]
    loaded = load(save(model, tmp_path, plan=plan), seeded(MODELS["weight_norm_parametrized"][0], 1))
    assert_same_outputs(loaded, model, torch.ones(2, 4))


def test_ways_to_call_save(tmp_path: Path) -> None:
    model, plan = pruned("cnn")
    Result = namedtuple("Result", "layers model plan")
    for given in (Result([], model, plan), (model, plan)):
        assert load(save(given, tmp_path), Net()).fc1.out_features == 6
    with pytest.raises(InputError, match="plan is a NoneType"):
        save(model, tmp_path)
    with pytest.raises(InputError, match="cannot save a str"):
        save("model", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="freshly built"):
        load(tmp_path, "model")  # type: ignore[arg-type]


def test_plan_must_have_been_applied(tmp_path: Path) -> None:
    _, plan = pruned("cnn")
    with pytest.raises(PlanError, match="applied to"):
        save(Net(), tmp_path / "x", plan=plan)
    assert not (tmp_path / "x").exists()


def test_what_only_pickle_could_store_is_refused(tmp_path: Path) -> None:
    class Extra(Net):
        def get_extra_state(self) -> Any:
            return {"anything": 1}

    _, plan = pruned("cnn")
    with pytest.raises(SaveError, match="extra state"):
        save(ispasp.apply_(Extra(), plan), tmp_path, plan=plan)


# --- folders that hold something already ------------------------------------------------------------------------------


def test_earlier_save_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    save(pruned("cnn"), tmp_path)
    (tmp_path / "config.json").write_text("{}")  # as if the earlier model had one
    save(pruned("tied_lm"), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "model.safetensors", "plan.json"]
    load(tmp_path, TiedLM())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "plan.json"])
def test_foreign_files_are_not_overwritten(name: str, tmp_path: Path) -> None:
    if name == "model.safetensors":
        save_file({"a": torch.ones(1)}, tmp_path / name, {"format": "pt"})
    else:
        (tmp_path / name).write_text("{}")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(SaveError, match="overwrite=True"):
        save(pruned("cnn"), tmp_path)
    assert (tmp_path / name).read_bytes() == before
    save(pruned("cnn"), tmp_path, overwrite=True)
    load(tmp_path, Net())


@pytest.mark.parametrize("step", ["write", "replace"])
@pytest.mark.parametrize("again", [False, True])
def test_interrupted_save_leaves_what_was_there(
    step: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if again:
        save(pruned("cnn"), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        if step == "replace":
            patch.setattr(os, "replace", interrupted)
        else:
            patch.setattr(files, "write_tensors", full)
        with pytest.raises(KeyboardInterrupt if step == "replace" else SaveError):
            save(pruned("tied_lm"), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot save Net"):
        save(pruned("cnn"), tmp_path / "file")
    with pytest.raises(SaveError, match="not a folder"):
        load(tmp_path / "file", Net())


# --- folders that cannot be loaded ------------------------------------------------------------------------------------


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def cut(bytes_left: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:bytes_left])

    return damage


def rewrite(change: Change) -> Callable[[Path], None]:
    """Change tensors or metadata and make the checksums fit again, as another program might."""
    return lambda folder: forge_model(folder / "model.safetensors", change)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def foreign(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit flipped": (flip_a_bit, "checksums differ"),
    "end cut off": (cut(-100), "damaged or cut short"),
    "header cut off": (cut(50), "damaged or cut short"),
    "emptied": (cut(0), "damaged or cut short"),
    "no tensors": (remove("model.safetensors"), "has no model.safetensors"),
    "foreign format": (foreign, "not written by ispasp"),
    "no metadata": (lambda f: save_file({"a": torch.ones(1)}, f / "model.safetensors"), "not written by ispasp"),
    "later version": (rewrite(lambda _, m: m.update(version="3")), "update ispasp"),
    "tensor missing": (rewrite(lambda t, _: t.__delitem__("fc2.bias")), "lacks fc2.bias"),
    "tensor in excess": (rewrite(lambda t, _: t.update(extra=torch.ones(1))), "has unexpected extra"),
    "wrong shape": (rewrite(lambda t, _: t.update({"fc2.bias": torch.ones(5)})), r"'fc2.bias' has shape \(5,\)"),
    "wrong type": (rewrite(lambda t, _: t.update({"fc2.bias": torch.ones(4, dtype=torch.int64)})), "is torch.int64"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    save(pruned("cnn"), tmp_path)
    damage(tmp_path)
    dense = seeded(Net, 1)
    before = snapshot(dense)
    with pytest.raises(SaveError, match=message):
        load(tmp_path, dense)
    assert same(snapshot(dense), before), "the model is exactly as before"


def test_failure_after_surgery_undoes_swaps_and_dtypes(tmp_path: Path) -> None:
    save(pruned("encoder", torch.bfloat16), tmp_path)
    rewrite(lambda t, _: t.update({"layers.1.norm2.weight": torch.ones(3)}))(tmp_path)
    dense = seeded(encoder, 1)
    before, expected = snapshot(dense), output_of(dense, MODELS["encoder"][1])
    with pytest.raises(SaveError, match=r"layers\.1\.norm2\.weight"):
        load(tmp_path, dense)
    assert torch.equal(output_of(dense, MODELS["encoder"][1])[0], expected[0])
    assert same(snapshot(dense), before)


def test_another_model_is_refused(tmp_path: Path) -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 24), nn.Linear(24, 4)

    save(pruned("cnn"), tmp_path)
    with pytest.raises(SaveError, match="holds a pruned Net, not a TiedLM"):
        load(tmp_path, TiedLM())
    with pytest.raises(PlanError, match=r"fc1\.weight"):
        load(tmp_path, Wider())
    with pytest.raises(PlanError, match="apply a plan once"):
        load(tmp_path, load(tmp_path, Net()))
    with torch.device("meta"):
        meta = Net()
    with pytest.raises(SaveError, match="real device"):
        load(tmp_path, meta)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_hugging_face_folder_builds_the_dense_model(name: str, tmp_path: Path) -> None:
    model, plan = pruned(name)
    model.generation_config = getattr(model, "generation_config", None)
    if name == "llama":
        model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    save(model, tmp_path, plan=plan)
    dense = MODELS[name][0]()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        config = type(model).config_class.from_dict(json.loads(file.metadata()["config"]))  # type: ignore[attr-defined]
    assert config.architectures == [type(model).__name__]
    kept = type(model)(config)
    assert {k: v.shape for k, v in kept.state_dict().items()} == {k: v.shape for k, v in dense.state_dict().items()}
    state = torch.random.get_rng_state()
    loaded = load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not loaded.training
    assert_same_outputs(loaded, model, MODELS[name][1])
    if name == "llama":
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight  # type: ignore[union-attr]
        assert loaded.generation_config.temperature == 0.25  # type: ignore[union-attr]
        ids = [m.generate(IDS, max_new_tokens=3, do_sample=False, temperature=None) for m in (loaded, model)]
        assert torch.equal(*ids)


@pytest.mark.long
def test_hugging_face_folder_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(pruned("bert"), tmp_path)
    path = tmp_path / "model.safetensors"
    whole, config = path.read_bytes(), json.loads((tmp_path / "config.json").read_text())
    for change in ({"architectures": ["NoSuchModel"]}, {"architectures": ["BertConfig"]}, {"architectures": None},
                   {"hidden_size": 30}, {"hidden_size": 64}):  # fmt: skip
        text = json.dumps({**config, **change})
        forge_model(path, lambda _, told, text=text: told.update(config=text))
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(IspaspError) as error:
            load(tmp_path)
        assert isinstance(error.value, (SaveError, PlanError))
    path.write_bytes(whole)
    (tmp_path / "config.json").write_text(json.dumps(config))

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtraError, match=r"ispasp\[transformers\]"):
            load(tmp_path)
    forge_model(path, lambda _, told: told.pop("config"))
    with pytest.raises(SaveError, match="pass the dense model"):
        load(tmp_path)
