"""Mutations of the library, one line each, and the test files that should notice: `make mutations` tries them all.

Each is (text, replacement); the text stands exactly once in its file. `make mutations` says so where it no longer does.
"""

from __future__ import annotations

ENGINE = ("tests/engine/test_runner.py", "tests/engine/test_rerun.py", "tests/engine/test_lockstep.py")
SITES = (*ENGINE, "tests/engine/test_padding.py")
BATCHES = ("tests/api/test_batches.py", "tests/engine/test_padding.py")
OPS, RULES = ("tests/graph/test_ops.py", "tests/compensate/test_fit.py"), ("tests/graph/test_rules.py",)
APPLY, TRIAL = ("tests/surgery/test_apply.py",), ("tests/surgery/test_trial.py", "tests/surgery/test_literal_split.py")
LAYOUT, ROWS = ("tests/engine/test_layout.py",), ("tests/engine/test_positions.py", "tests/compensate/test_few_rows.py")
ALLOCATE, CURVE, LIMITS = ((f"tests/budget/test_{name}.py",) for name in ("allocate", "curve", "limits"))

Pair = tuple[str, str]
MUTANTS: dict[tuple[str, tuple[str, ...]], list[Pair]] = {
    ("budget/allocate.py", ALLOCATE): [
        ("if problem.slack(smallest) < 0:", "if problem.slack(smallest) <= 0:"),
        ("hull.pop()", "hull.pop(0)"),
        (">= (e[c] - e[a]) * (w[b] - w[a])", "<= (e[c] - e[a]) * (w[b] - w[a])"),
        ("max(least, curve.kept[0])", "least"),
        ("step = round_to or 1", "step = 1"),
        ("other = k - 1 if k > 0 else k + 1", "other = k - 1"),
        ("while problem.slack(place) < 0 and rates:", "while problem.slack(place) < -1 and rates:"),
        ("if saved <= 0:", "if saved < 0:"),
        ("if rates and rate > rates[0][0]:", "if False:"),
        ("problem.slack(_at(place, {d: k})) < 0)", "problem.slack(_at(place, {d: k})) <= 9)"),
        ("if cost <= problem.slack(place)]", "]"),
        ("d = max(candidates, key=rates.__getitem__)", "d = min(candidates, key=rates.__getitem__)"),
        ("    for _ in range(_ROUNDS):\n", "    for _ in range(0):\n"),
        ("_NEAR = 0.01", "_NEAR = 0.5"),
        ("needed = np.maximum(more * slopes[up] - slack, 0.0)", "needed = more * slopes[up] * 0.0"),
    ],
    ("budget/curve.py", CURVE): [
        ("_grid(units, int(points)), float(E.sum())", "_grid(units, int(points)), float(E.diagonal().sum())"),
        ("np.minimum.accumulate([*error, 0.0]).tolist()", "[*error, 0.0]"),
        ("missing[removed].sum()", "missing.sum()"),
        ("lost = lost - b @", "lost = lost + 0 * b @"),
        ('if "gram" not in selector.needs:', 'if "gram" in selector.needs:'),
        ("E[unit] += ((V.T @ V) * G.double()).sum()", "E[unit] = ((V.T @ V) * G.double()).sum()"),
    ],
    ("budget/limits.py", LIMITS): [
        ("+ 1e-6)", ")"),
        ("if least <= self.limit(cost):", "if least < self.limit(cost):"),
        ('what: ClassVar[str] = "params"', 'what: ClassVar[str] = "macs"'),
    ],
    ("engine/runner.py", ENGINE): [
        ("{**self.tensors, **other.tensors}", "{**other.tensors, **self.tensors}"),
        ("if self._dense is None and self._twin and self._is_edited(node):", "if self._dense is None and self._twin:"),
        ("values.pop(gone, None)", "values.get(gone, None)"),
        ("return _cloned(self._pruned) if self.graph.writes else dict(self._pruned)", "return dict(self._pruned)"),
        ("any(n in self.edits.cuts or n in self.edits.biases for n in", "any(n in self.edits.cuts for n in"),
        ("if self._at <= order[w] < order[target]]", "if False]"),
        ("values = _cloned(live) if any(mutates(node) for node in ordered) else dict(live)", "values = dict(live)"),
        ("edited=not dense, cut=cut)", "edited=True, cut=cut)"),
        ("runner.edits = edits\n", "pass\n"),
        ("runner.bytes * len(self._runners) > self.memory", "runner.bytes > self.memory"),
        ("self._runners, self.rerunning = [], True", "self.rerunning = True"),
        ("x.masked_fill(gone, 0)", "x * ~gone"),
        ('and given.get("groups", 1) == 1 else None', "else None"),
        ("y = call(node, pytree.tree_map_only(Tensor, Tensor.abs, given))", "y = call(node, given)"),
        ("return widened(value) if self._precise else value", "return value"),
    ],
    ("engine/graphs.py", (*ENGINE, "tests/api/test_prune_inputs.py")): [
        ("value.clone() if value is given and node in self.writes else value", "value"),
        ("values[node] = known[source.name].detach().clone()", "values[node] = known[source.name].detach()"),
        ("if not len(found) == len(old.contractions) == len(new.contractions):", "if not found:"),
        ("if met != sorted(met):", "if False:"),
    ],
    ("graph/trace.py", (*ENGINE, "tests/api/test_prune_inputs.py")): [
        ("shared += node.args[:1] if node.target in _MAY_RETURN_INPUT else []", "pass"),
    ],
    ("graph/trace.py", LAYOUT): [
        ("        if node not in written:\n", "        if True:\n"),
        ("return known and torch.Tag.nondeterministic_seeded not in op.tags", "return known"),
        ("return not copied and all(", "return all("),
    ],
    ("compensate/refit.py", ROWS): [
        ("weight=whole + (fit.weight - W0) @ data.basis.mT", "weight=whole"),
        ("scale = W0.shape[-1] / max(1, whole.shape[-1])", "scale = 1.0"),
        ("H, T = H[rows], T[rows]\n", "H, T = H[rows], T[: len(rows)]\n"),
        ("T = T if at is None else T.flatten(2)[..., at]", "T = T if at is None else T.flatten(2)[..., : len(at)]"),
    ],
    ("types/statistics.py", ROWS): [
        ("share = math.prod(output_size(consumer, H)) / len(at)", "share = 1.0"),
    ],
    ("engine/sites.py", ROWS): [
        ("if wanted is None or wanted > _MOST * size:", "if wanted is None:"),
        ("return self.alone and columns > _WIDE", "return columns > _WIDE"),
    ],
    ("engine/sites.py", SITES): [
        ("return self.contraction.data.put(arguments, x.masked_fill(~kept, 0))", "return arguments"),
        ("factor = outputs if factor is None else factor * outputs", "factor = outputs"),
        ("all(map(_same, known[0], given))", "True"),
        (" and torch.equal(a, b)", ""),
        ("factor if factor[0] in read and factor[0] in wanted else", "factor if factor[0] in wanted else"),
        ("return sorted(found, key=lambda site: order[site.contraction.node])", "return found[::-1]"),
    ],
    ("engine/batches.py", BATCHES): [
        ("if total < ENOUGH:", "if total < 8 * ENOUGH:"),
        ("part(pair, slice(size - last, size))", "part(pair, slice(0, last))"),
        ("return masks if any(not bool(mask.all()) for mask in masks) else ()", "return ()"),
    ],
    ("graph/ops.py", OPS): [
        ("if user.args[0] is not at or user.args[5]:", "if user.args[0] is not at:"),
        ("            if user.args[2]:  # training=True\n", "            if False:\n"),
        ('if (a.get("beta", 1), a.get("alpha", 1)) != (1, 1):', "if False:"),
        ("if data.get(a).shape[:-2] != W.shape[:-2]:", "if False:"),
        (
            "if broadcast or len(set(x)) < len(x) or len(set(w)) < len(w):",
            "if len(set(x)) < len(x) or len(set(w)) < len(w):",
        ),
        ("if any(c not in out for c in (*rows, *made)):", "if False:"),
        ('return linear_forms(a["weight"]) if data.name == "input" else []', 'return linear_forms(a["weight"])'),
        ('transposed = bool(a.get("transposed", "output_padding" in a))', "transposed = False"),
        ('other is at or user.kwargs.get("alpha", 1) != 1:', "other is at:"),
        (
            'return other if getattr(other.meta.get("val"), "shape", None) == at.meta["val"].shape else None',
            "return other",
        ),
        ("return other if fits and sources", "return other if sources"),
        ("if not isinstance(bias, Tensor) or channel is None or bias.ndim != 1:", "if True:"),
        (
            "total = torch.rsqrt(value_of[arguments[4]].double() + arguments[7])",
            "total = torch.rsqrt(value_of[arguments[4]].double())",
        ),
        ('if channels == "conv" else channels', "if False else channels"),
        ("bounds = pairwise([0, *ends.tolist()])", "bounds = pairwise([0, 0, *ends.tolist()])"),
    ],
    ("graph/rules/freezing.py", RULES): [
        ("    if training:\n        t.freeze(node, x.without(1)", "    if False:\n        t.freeze(node, x.without(1)"),
    ],
    ("surgery/remove.py", APPLY): [
        ("module._buffers[leaf] = done[id(tensor)][1]", "pass"),
        ("_rescaled(name, small, scales[name]) if name in scales else small", "small"),
        ("None if grad is None else _cut(grad, layout, plan)", "None"),
        ("state[key] = _cut(value, layout, plan)", "pass"),
        ("    undo.callback(restore)", "    pass"),
        ("if tuple(tensor.shape) != layout.shape:", "if False:"),
        ("return small.contiguous(memory_format=torch.channels_last)", "return small.contiguous()"),
        ("        if found != expected:\n", "        if False:\n"),
        ("            if getattr(module, name, size) != size:\n", "            if False:\n"),
        ("            _set_attribute(module, whole, weight, undo)", "            pass"),
        ("requires_grad=weight.requires_grad)", "requires_grad=True)"),
        ("if isinstance(error, (IspaspError, torch.OutOfMemoryError)):", "if isinstance(error, IspaspError):"),
    ],
    ("surgery/trial.py", TRIAL): [
        ("_FRACTIONS = (0.5, 0.4, 0.6, 0.45, 0.55)", "_FRACTIONS = (0.5,)"),
        ("(firsts[size, n], abs(n - wishes[0]))", "abs(n - wishes[0])"),
        ("choices = (*choices, two_choices(backwards, seed=1)[0])", "pass"),
        ("step = 4 if size >= 16 else 1", "step = 1"),
        ("        if error <= self._limit:\n", "        if error < float('inf'):\n"),
        ("                self._try_training(self._left(choices[0]))\n", ""),
        ("if _ops(graph.trace) == _ops(analysis.trace):", "if True:"),
        (
            "guilty = _bisect(kept, self._is_wrong) or [self._last_straw(kept)]",
            "guilty = _bisect(kept, self._is_wrong) or list(kept)",
        ),
        ("key=tokens)", "key=lambda part: -tokens(part))"),
        ('same = () if cls.__module__.startswith("torch.nn") else self.model.named_modules()', "same = ()"),
    ],
    ("surgery/verify.py", (*APPLY, *TRIAL, "tests/api/test_proof_outputs.py")): [
        ("return outcome.error if outcome.flipped <= _FLIPPED else", "return outcome.error if True else"),
        ("return least == most == 0 or not math.isfinite(least) or not math.isfinite(most)", "return False"),
        (
            "return Comparison(error if not math.isnan(error) else math.inf, b.numel() if size else 0)",
            "return Comparison(error, b.numel())",
        ),
        (
            "return max(known, default=_TOLERANCE[torch.float32])",
            "return min(known, default=_TOLERANCE[torch.float32])",
        ),
        ("    with evaluating(model), seeded():\n        graph", "    with evaluating(model):\n        graph"),
    ],
    ("surgery/corrections.py", TRIAL): [
        ("            if found:\n", "            if True:\n"),
        ("if type(module) is cls:", "if False:"),
    ],
}

# Survivors, by their text: why they do no harm.
HARMLESS: dict[str, str] = {}
