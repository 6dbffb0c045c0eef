"""Folders that transformers opens without ispasp: by a config that says the widths, else by code in the folder.

Everything is found by trial, nothing by the name of a model. A field of the config is changed if layers that are built
from it then have the sizes of the pruned ones. What is written is opened, and must give the pruned model's outputs.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ispasp import _resized
from ispasp.engine.batches import tensors_of
from ispasp.graph.trace import named_tensors
from ispasp.surgery.corrections import parts_of
from ispasp.surgery.remove import numbers, write_number
from ispasp.surgery.verify import Frame, output_of, relative_error, watching
from ispasp.types.dimension import full_length, kept_length
from ispasp.types.plan import Plan

CODE = "modeling_pruned.py"
_TABLE = "pruned_widths"
_PIN = "head_dim"  # transformers' name for the size of a head; models derive it from others where it is not given
_ALLOW = "allow_global_per_layer_attribute_access"
_TRIALS = 200  # of two fields at once
_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 1e-1}  # else 1e-5
Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]
Path_ = tuple[str | int, ...]  # keys and indices


@dataclass(frozen=True)
class Opening:
    """A way to open a folder: the text of its `config.json`, and what else that takes.

    `zeros` are biases that the config adds, and the pruned model does not have.
    """

    way: Literal["plain", "code", "ispasp"]
    config: str = ""
    code: str = ""
    zeros: Mapping[str, Tensor] = field(default_factory=dict)
    call: str = "ispasp.load(folder)"
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"opens with {self.call}" + (f" ({'; '.join(self.why)})" if self.why else "")


def openings(model: Any, plan: Plan, config: Any, write: Callable[[Opening], Path], example: Any) -> Opening:
    """Find the simplest way that works. `write` makes a folder for a way, `config` is the dense one."""
    family, why = _Family.of(model, config), list[str]()
    example = _dummy(model) if example is None else example
    if isinstance(family, str):
        return Opening("ispasp", why=(family,))
    if example is None:
        return Opening("ispasp", why=("outputs cannot be compared without a batch: pass example=",))
    for way in (family.plain(plan), family.code(plan, example)):
        reason = ""
        for found in way:
            wrong = found if isinstance(found, str) else family.differs(found, write(found), example)
            if not wrong:
                assert isinstance(found, Opening)  # noqa: S101
                return replace(found, why=tuple(why))
            reason = reason or wrong
        why.append(reason)
    return Opening("ispasp", why=tuple(why))


def write_configs(model: Any, plan: Plan, folder: Path) -> Any:
    """Write the dense config of a Hugging Face model, without importing transformers. Returns the config."""
    holder: Any = nn.Module()
    holder.config = copy.deepcopy(model.config)
    for attribute in plan.structure.attributes:
        if not attribute.module and attribute.name.startswith("config."):
            write_number(holder, attribute.name, full_length(attribute.extent))
    holder.config.architectures = [type(model).__name__]
    holder.config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    return holder.config


@dataclass(frozen=True, eq=False)
class _Family:
    """A pruned model, its class in transformers, and the dense config as a dictionary."""

    model: Any
    cls: Any
    dense: Config
    transformers: Any

    @staticmethod
    def of(model: Any, config: Any) -> _Family | str:
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            return "transformers is not installed here"
        for cls in type(model).__mro__:
            if getattr(transformers, cls.__name__, None) is cls and cls is not transformers.PreTrainedModel:
                ours = (_TABLE, "auto_map", "per_layer_config", _ALLOW) if hasattr(config, _TABLE) else ()
                dense = {key: value for key, value in config.to_dict().items() if key not in ours}
                dense |= {"architectures": [cls.__name__], "dtype": str(model.dtype).removeprefix("torch.")}
                family = _Family(model, cls, dense, transformers)
                return family if family.shapes(dense) else f"{cls.__name__} cannot be built from its config"
        return f"{type(model).__name__} is not a class of transformers"

    @property
    def limit(self) -> float:
        """Relative differences of outputs that rounding explains."""
        return _ROUNDING.get(self.model.dtype, 1e-5)

    def built(self, config: Config, changes: Config | None = None) -> Any:
        """The model without data. Changes are not validated, as those of single layers are not."""
        made = self.cls.config_class.from_dict(copy.deepcopy(config))
        for name, value in (changes or {}).items():
            setattr(made, name, value)
        with torch.device("meta"):
            return self.cls(made)

    def shapes(self, config: Config, within: str = "") -> Shapes | None:
        """The shapes of all tensors, or of those of one layer."""
        changes = {name: value for name, value in config.items() if within and value != self.dense.get(name)}
        with suppress(Exception):  # configs and constructors refuse in their own ways
            return _shapes(self.built(self.dense if within else config, changes), within)
        return None

    def text(self, config: Config) -> str:
        return str(self.cls.config_class.from_dict(copy.deepcopy(config)).to_json_string())

    def call(self, code: bool) -> tuple[str, list[tuple[str, str]]]:
        """How users open the folder, and the Auto classes of this kind of model with their classes."""
        kind = str(self.dense.get("model_type"))
        found = []
        for name, auto in vars(self.transformers.models.auto.modeling_auto).items():
            names = getattr(getattr(auto, "_model_mapping", None), "_model_mapping", {})
            given = names.get(kind) if name.startswith("AutoModel") else None
            found += [(name, given if isinstance(given, str) else given[0])] if given else []
        mine = [name for name, given in found if given == self.cls.__name__]
        name = min(mine, key=lambda name: (name == "AutoModelForPreTraining", name), default=self.cls.__name__)
        if code and not mine:
            name = "AutoModel"
            found = [*(row for row in found if row[0] != name), (name, self.cls.__name__)]
        return f"{name}.from_pretrained(folder{', trust_remote_code=True' if code else ''})", found

    # A config that says it --------------------------------------------------------------------------------------

    def plain(self, plan: Plan) -> Iterator[Opening | str]:
        """Yields the dense config with other numbers, from which transformers builds the pruned sizes."""
        wanted = _shapes(self.model)
        if uneven := _uneven(wanted, self.shapes(self.dense) or {}):
            yield f"layers have different widths, as {uneven}"
        else:
            for found in self.searches(list(_moves(self.dense, plan)), wanted):
                if isinstance(found, str):
                    remedy = ": bias='keep' adds none" if found.removesuffix(".bias") in plan.structure.biases else ""
                    yield f"{self.cls.config_class.__name__} cannot say the size of {found}{remedy}"
                    continue
                extra = {name: shape for name, shape in (self.shapes(found) or {}).items() if name not in wanted}
                zeros = {name: torch.zeros(shape, dtype=self.model.dtype) for name, shape in extra.items()}
                yield Opening("plain", self.text(found), zeros=zeros, call=self.call(code=False)[0])

    def searches(self, moves: list[_Move], wanted: Shapes, within: str = "") -> Iterator[Config | str]:
        """Yields what `search` finds, then what it finds without one of the fields: numbers may be equal by chance."""
        used: list[Path_] = []
        yield self.search(moves, wanted, within, used)
        for path in tuple(used):
            yield self.search([move for move in moves if move.path != path], wanted, within, [])

    def search(self, moves: list[_Move], wanted: Shapes, within: str, used: list[Path_]) -> Config | str:
        """Change fields, one or two at a time, while more tensors come to have the wanted shapes.

        Returns the config, or a tensor that has another shape whatever is changed. Adds to `used` what it changed.
        """
        config = self.dense

        def misfits(config: Config) -> list[str]:
            shapes = self.shapes(config, within)
            if shapes is None:
                return [*wanted, "anything"]
            extra = [name for name in shapes if name not in wanted and not name.endswith(".bias")]
            return [*(name for name, shape in wanted.items() if shapes.get(name) != shape), *extra]

        left = misfits(config)
        while left:
            pairs = (pair for pair in combinations(moves, 2) if _together(*pair))
            for tries in (((move,) for move in moves), islice(pairs, _TRIALS)):
                news = [(chosen, _changed(config, chosen)) for chosen in tries]
                found = [misfits(new) for _, new in news]
                best = min(found, key=len, default=left)
                if len(best) < len(left):
                    left, (chosen, config) = best, news[found.index(best)]
                    used += [move.path for move in chosen]
                    moves = [move for move in moves if move.path not in used]
                    break
            else:
                return left[0]
        return config

    # Code in the folder -----------------------------------------------------------------------------------------

    def code(self, plan: Plan, example: Any) -> Iterator[Opening | str]:
        """Yields the dense config with a table of what differs, and the file that resizes the class by it.

        The first one also has the sizes of layers as transformers' `per_layer_config`, which its caches read.
        """
        table = self.table()
        if isinstance(table, str):
            yield table
            return
        layers = self.layers(plan, example)
        if layers:
            shared = {name: value for each in layers.values() for name, value in each.items() if name not in self.dense}
            config = {**self.dense, **shared, "per_layer_config": layers, _TABLE: table}
            for more in ({}, {_ALLOW: True}):  # some configs check what they forbid
                with suppress(Exception):
                    yield self.with_code({**config, **more})
        yield self.with_code({**self.dense, _TABLE: table})

    def layers(self, plan: Plan, example: Any) -> dict[str, Config]:
        """Fields of the config that differ, layer by layer; nothing where fields cannot say it."""
        paths, found = _layers(self.model), dict[str, Config]()
        if self.dense.get("is_encoder_decoder") or len(paths) != getattr(self.model.config, "num_hidden_layers", 0):
            return {}
        calls = _calls(self.model, paths, example)
        known: set[Path_] = set()
        for number, path in enumerate(paths):
            wanted, moves = _shapes(self.model, path), list(_moves(self.dense, plan, path))
            likely = {move.path: move for move in moves if move.path in known}
            first = _changed(self.dense, tuple(likely.values())) if likely else self.dense
            for new in chain([first] if self.shapes(first, path) == wanted else [], self.searches(moves, wanted, path)):
                changes = {} if isinstance(new, str) else {n: v for n, v in new.items() if v != self.dense.get(n)}
                if not isinstance(new, str) and path in calls and self.runs_alike(changes, path, *calls[path]):
                    break
            else:
                return {}
            found[str(number)] = changes
            known |= {(name,) for name in changes}
        return found

    def runs_alike(self, changes: Config, path: str, frame: Frame, expected: list[Tensor]) -> bool:
        """Whether a layer that is built with these changes gives what the pruned layer gave."""
        layer = self.built(self.dense, changes).get_submodule(path).to_empty(device=self.model.device).eval()
        layer, mine = layer.to(self.model.dtype), named_tensors(self.model.get_submodule(path))
        with suppress(Exception), torch.no_grad():  # a forward may raise anything
            for name, tensor in named_tensors(layer).items():
                tensor.copy_(mine[name]) if name in mine else tensor.zero_()
            return relative_error(tensors_of(layer(*frame.args, **frame.kwargs)), expected) <= self.limit
        return False

    def with_code(self, config: Config) -> Opening:
        """A folder with code: every class that transformers has for this kind of model, resized."""
        call, autos = self.call(code=True)
        text = Path(_resized.__file__).read_text(encoding="utf-8")
        names = sorted({cls for _, cls in autos if hasattr(self.transformers, cls)})
        classes = [f"{name} = pruned(transformers.{name})" for name in names]
        config["auto_map"] = {a: f"{CODE.removesuffix('.py')}.{c}" for a, c in autos if c in names}
        code = "\n".join([text, "\nimport transformers  # noqa: E402\n", *classes, ""])
        return Opening("code", self.text(config), code, call=call)

    def table(self) -> Config | str:
        """Tensors and numbers of the pruned model that differ from those of the dense class."""
        dense = self.built(self.dense)
        theirs = {name: tuple(t.shape) for name, t in named_tensors(dense).items()}
        mine = {name: tuple(t.shape) for name, t in named_tensors(self.model).items()}
        modules = dict(dense.named_modules())
        attributes: dict[str, dict[str, int]] = {}
        for path, module in self.model.named_modules():
            if type(modules.get(path)) is not (self.cls if not path else type(module)):
                return f"{path} has become a {type(module).__name__}, which transformers does not know"
            known = dict(numbers(modules[path]))
            if changed := {name: n for name, n in numbers(module) if known.get(name, n) != n}:
                attributes[path] = changed
        if lost := next((name for name in theirs if name not in mine), ""):
            return f"{lost} is gone from the pruned model"
        known, named = dict(numbers(dense)), [name for name in attributes.get("", ()) if "." in name]
        root = {name.removeprefix("config."): known[name] for name in named}
        tensors = {name: list(shape) for name, shape in mine.items() if theirs.get(name) != shape}
        return {"tensors": tensors, "attributes": attributes, "dense": root}

    # The trial --------------------------------------------------------------------------------------------------

    def differs(self, opening: Opening, folder: Path, example: Any) -> str:
        """Open a folder as users do. Returns what is wrong with the model that comes out, or nothing."""
        cls = _resized.pruned(self.cls) if opening.code else self.cls
        how = "with the code in the folder" if opening.code else "by its config"
        options = {"attn_implementation": getattr(self.model.config, "_attn_implementation", None), "dtype": "auto"}
        try:
            with torch.random.fork_rng(devices=[]), _quiet(self.transformers.utils.logging):
                opened, told = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
            opened = opened.to(next(self.model.parameters()).device)
            if unlike := [key for key, names in told.items() if names]:
                return f"opened {how} it has {', '.join(unlike).replace('_', ' ')}"
            mine, theirs = self.model.state_dict(), opened.state_dict()
            wrong = [name for name in mine if name not in theirs or not torch.equal(mine[name], theirs[name])]
            if wrong:
                return f"opened {how} it has another {wrong[0]}"
            error = relative_error(output_of(opened, example), output_of(self.model, example))
        except Exception as failure:  # whatever transformers raises
            return f"it does not open {how} ({type(failure).__name__}: {' '.join(str(failure).split())[:200]})"
        return "" if error <= self.limit else f"opened {how} its outputs differ by {error:.0e}"


# Fields of a config -------------------------------------------------------------------------------------------------


class _Move(NamedTuple):
    """A field of a config, by its keys and indices, and the value to try."""

    path: Path_
    value: int | bool
    old: int | None = None


def _fields(config: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yields numbers, booleans and fields without a value, of sub-configs and lists too."""
    if isinstance(config, (dict, list)):
        for key, value in config.items() if isinstance(config, dict) else enumerate(config):
            yield from _fields(value, (*path, key))
    elif config is None or isinstance(config, (bool, int)):
        yield path, config


def _moves(config: Config, plan: Plan, within: str = "") -> Iterator[_Move]:
    """Yields a new value for every field that equals a dense size, is not set, or switches a bias off."""
    parts = [*parts_of(within, plan.structure, plan.kept)]
    sizes = {(full_length(part), kept_length(part, plan.kept)) for part in parts}
    products = [part[0] for part in parts if len(part) == 1 and len(part[0]) > 1]
    heads = {segment[-1][1] for segment in products if segment[-1][0] is None}  # the size follows the units
    for path, value in _fields(config):
        if value is False and "bias" in str(path[-1]):
            yield _Move(path, True)
        elif value is None and path[-1] == _PIN:
            yield from (_Move(path, size) for size in sorted(heads))
        elif value is None or not isinstance(value, bool):
            news = {kept for full, kept in sizes if value in (None, full) and kept not in (0, full)}
            yield from (_Move(path, new, value) for new in sorted(news))
    for path in {path[:-1] for path, _ in _fields(config)}:
        inner = _at(config, path)
        if isinstance(inner, dict) and "model_type" in inner and _PIN not in inner:
            yield from (_Move((*path, _PIN), size) for size in sorted(heads))


def _together(one: _Move, other: _Move) -> bool:
    """Whether two fields may have to change at once: numbers of heads that are equal, or one whose size derives."""
    same = one.old is not None and (one.old, one.value) == (other.old, other.value)
    return one.path != other.path and (same or _PIN in (one.path[-1], other.path[-1]))


def _at(config: Any, path: Path_) -> Any:
    for key in path:
        config = config[key]
    return config


def _changed(config: Config, moves: tuple[_Move, ...]) -> Config:
    new = copy.deepcopy(config)
    for move in moves:
        _at(new, move.path[:-1])[move.path[-1]] = move.value
    return new


def _shapes(model: nn.Module, within: str = "") -> Shapes:
    inside = f"{within}." if within else ""
    named = model.state_dict(keep_vars=True).items()
    return {name: tuple(tensor.shape) for name, tensor in named if name.startswith(inside)}


def _layers(model: nn.Module) -> list[str]:
    """The paths of a model's layers: the members of its longest list of modules."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and ".0." not in path]
    path, longest = max(lists, key=lambda row: len(row[1]), default=("", nn.ModuleList()))
    return [f"{path}.{number}" for number in range(len(longest))]


def _calls(model: nn.Module, paths: list[str], example: Any) -> dict[str, tuple[Frame, list[Tensor]]]:
    """What each layer was called with, and what it returned."""
    found: dict[str, tuple[Frame, list[Tensor]]] = {}

    def note(frame: Frame, output: Any) -> None:
        if frame.path in paths:
            found[frame.path] = frame, tensors_of(output)

    with suppress(Exception), watching(model, [], note):
        output_of(model, example)
    return found


def _uneven(wanted: Shapes, dense: Shapes) -> str:
    """A tensor that layers had of one shape and have of several now."""
    seen: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for name, shape in wanted.items():
        if name in dense:
            like = re.sub(r"\.\d+\.", ".*.", name)
            if seen.setdefault((like, dense[name]), shape) != shape:
                return like
    return ""


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without progress bars and reports of transformers."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _dummy(model: Any) -> Any:
    """A batch for models of text and images, where none is given."""
    main, config = getattr(model, "main_input_name", ""), model.config
    device = next(model.parameters()).device
    if main == "input_ids":
        ids = model.dummy_inputs["input_ids"].to(device)
        return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    side = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(side, int):
        shape = 2, getattr(config, "num_channels", 3), side, side
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.rand(shape, generator=generator).to(device, model.dtype)}
    return None
