"""Fine-tuning: what is minimised, what is left alone, what is refused."""

from __future__ import annotations

import copy
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ispasp._finetune import finetune
from ispasp.errors import InputError, MissingExtraError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.train import AdamW, Sgd, Teacher
from ispasp.train.objective import Objective, distance
from ispasp.train.recipe import SCHEDULES

Batches = list[tuple[Tensor, Tensor]]


def network(seed: int = 0, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    middle += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


def examples(n: int = 48, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def batches(size: int = 8, n: int = 48) -> Batches:
    x, y = examples(n)
    return list(zip(x.split(size), y.split(size), strict=True))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(model: nn.Module, data: Batches, steps: int, lr: float, smoothing: float = 0.0) -> list[float]:
    """The cosine SGD that `finetune` should be, in plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_is_sgd_with_momentum_and_cosine(smoothing: float) -> None:
    ours, theirs = network(norm=True), network(norm=True)
    result = finetune(ours, batches(), epochs=2.5, recipe=Sgd(lr=0.1), label_smoothing=smoothing)
    losses = by_hand(theirs.train(), batches(), 15, 0.1, smoothing)
    assert result.steps == 15
    assert result.model is ours
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_is_adamw_with_linear_decay() -> None:
    ours, theirs = network(), network()
    finetune(ours, batches(), epochs=2, recipe=AdamW(lr=0.01))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.01)
    for step, (x, y) in enumerate(batches() * 2):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 12)
        optimizer.zero_grad()
        functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(parameters(ours), parameters(theirs))


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    steps=st.integers(1, 40),
    warmup=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_schedules_start_at_the_learning_rate_and_never_rise_after_warmup(
    schedule: str, steps: int, warmup: float
) -> None:
    recipe = Sgd(lr=0.3, schedule=schedule, warmup=warmup)
    rising = round(warmup * steps)
    rates = [recipe.lr_at(step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    assert rates[:rising] == sorted(rates[:rising])
    if rising < steps:
        assert rates[rising] == pytest.approx(0.3)
    assert rates[rising:] == sorted(rates[rising:], reverse=True)


def test_warmup_rises_in_equal_steps_then_the_schedule_begins() -> None:
    rates = [AdamW(lr=1.0, warmup=0.4).lr_at(step, 10) for step in range(10)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1 - done / 6 for done in range(6)])


def test_step_decay_is_the_papers() -> None:
    rates = [Sgd(lr=1e-3, schedule="steps").lr_at(step, 8) for step in range(8)]
    assert rates == pytest.approx([1e-3] * 4 + [1e-4] * 2 + [1e-5] * 2)


@settings(max_examples=10)
@given(st.sampled_from([(2, 8), (4, 4), (3, 5), (5, 16)]))
def test_accumulated_parts_equal_whole_batches(case: tuple[int, int]) -> None:
    accumulate, size = case
    data = batches(size, n=44)  # the last batch is smaller
    groups = [data[i : i + accumulate] for i in range(0, len(data), accumulate)]
    whole = [(torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])) for group in groups]
    a, b = network(), network()
    in_parts = finetune(a, data, epochs=2, recipe=Sgd(lr=0.1), accumulate=accumulate)
    at_once = finetune(b, whole, epochs=2, recipe=Sgd(lr=0.1))
    assert in_parts.steps == at_once.steps == 2 * len(whole)
    assert in_parts.losses == pytest.approx(at_once.losses, rel=1e-5)
    torch.testing.assert_close(parameters(a), parameters(b))


def test_half_an_epoch_sees_half_the_data() -> None:
    seen: list[int] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(int(batch[0][0, 0] * 1e6))
        return functional.cross_entropy(output, batch[1])

    data = batches()
    assert finetune(network(), data, epochs=0.5, loss=loss).steps == 3
    assert seen == [int(x[0, 0] * 1e6) for x, _ in data[:3]]
    assert finetune(network(), data, epochs=0.01).steps == 1


def test_distillation_lowers_the_distance_to_the_teacher() -> None:
    teacher, student = network(5).eval(), network(6)
    for parameter in teacher.parameters():
        parameter.data.mul_(3)
    x, _ = examples()
    inputs = list(x.split(8))  # no labels
    with torch.no_grad():
        before = distance(student(x), teacher(x), 2.0)
    reference = copy.deepcopy(teacher.state_dict())
    finetune(student, inputs, epochs=20, recipe=Sgd(lr=0.05), teacher=Teacher(teacher, weight=1))
    with torch.no_grad():
        after = distance(student(x), teacher(x), 2.0)
    assert float(after) < 0.1 * float(before)
    assert all(torch.equal(a, b) for a, b in zip(teacher.state_dict().values(), reference.values(), strict=True))


def test_the_teacher_runs_in_eval_mode_and_keeps_its_modes() -> None:
    teacher = network(5, norm=True, dropout=0.5).train()
    before = copy.deepcopy(teacher.state_dict())
    finetune(network(), batches(), teacher=teacher, epochs=0.5)
    assert all(module.training for module in teacher.modules())
    assert all(torch.equal(a, b) for a, b in zip(teacher.state_dict().values(), before.values(), strict=True))


def test_task_and_teacher_are_mixed_by_weight() -> None:
    teacher, model = network(5), network(6)
    batch = batches()[0]
    task = Objective()(model, batch)
    apart = distance(model(batch[0]), teacher(batch[0]), 3.0)
    mixed = Objective(teacher=Teacher(teacher, temperature=3.0, weight=0.25))(model, batch)
    torch.testing.assert_close(mixed, 0.75 * task + 0.25 * apart)


@pytest.mark.parametrize("shape", [(4, 5), (4, 7, 5), (4, 5, 2, 3)])
def test_distance_is_the_kl_divergence_per_position(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(shape), torch.randn(shape)
    flat = [t.movedim(1 if t.ndim != 3 else 2, -1).reshape(-1, 5) for t in (student, teacher)]
    log_q, log_p = (functional.log_softmax(t / 2, 1) for t in flat)
    expected = 4 * functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    torch.testing.assert_close(distance(student, teacher, 2.0), expected)


class WithOwnLoss(nn.Module):
    """Speaks as a Hugging Face model does."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.net, self.weight = network(), weight

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        return SimpleNamespace(loss=self.weight * functional.cross_entropy(logits, labels), logits=logits)


def test_dict_batches_use_the_models_own_loss_or_its_logits() -> None:
    dicts = [{"x": x, "labels": y} for x, y in batches()]
    ours, plain = WithOwnLoss(2.0), network()
    losses = finetune(ours, dicts, epochs=0.5, recipe=Sgd(lr=1e-9)).losses
    assert losses == pytest.approx([2 * v for v in finetune(plain, batches(), epochs=0.5, recipe=Sgd(lr=1e-9)).losses])
    smooth = finetune(WithOwnLoss(2.0), dicts, epochs=0.5, recipe=Sgd(lr=1e-9), label_smoothing=0.2).losses
    expected = finetune(network(), batches(), epochs=0.5, recipe=Sgd(lr=1e-9), label_smoothing=0.2).losses
    assert smooth == pytest.approx(expected)


def test_labels_in_a_dict_are_kept_from_a_model_that_takes_none() -> None:
    dicts = [{"input": x, "labels": y} for x, y in batches()]
    losses = finetune(network(), dicts, epochs=0.5).losses
    assert losses == finetune(network(), batches(), epochs=0.5).losses


def test_a_hugging_face_classifier_learns() -> None:
    pytest.importorskip("transformers")
    import_torchvision()  # transformers imports it
    import transformers

    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    untrained = copy.deepcopy(model)
    ids = torch.randint(5, 20, (32, 6))
    labels = (ids[:, 1] > 12).long()
    loader = [{"input_ids": a, "labels": b} for a, b in zip(ids.split(8), labels.split(8), strict=True)]
    loader = [transformers.BatchEncoding(batch) for batch in loader]
    result = finetune(model, loader, epochs=24, recipe=AdamW(lr=0.01))
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert not model.training
    with torch.no_grad():
        student, teacher = untrained(**loader[0]), model(**loader[0])
        expected = 0.75 * student.loss + 0.25 * distance(student.logits, teacher.logits, 2.0)
    distilled = finetune(untrained, loader, epochs=0.25, teacher=Teacher(model, weight=0.25))
    assert distilled.losses[0] == pytest.approx(float(expected), rel=1e-5)


def test_own_loss_and_own_inputs() -> None:
    data = [{"image": x, "target": x.sum(1, keepdim=True)} for x, _ in batches()]
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    result = finetune(
        model,
        data,
        epochs=30,
        recipe=Sgd(lr=0.05),
        loss=lambda output, batch: functional.mse_loss(output, batch["target"]),
        input_of=lambda batch: batch["image"],
    )
    assert result.losses[-1] < 1e-2 * result.losses[0]
    torch.testing.assert_close(model.weight.detach(), torch.ones(1, 6), rtol=0, atol=0.1)


def test_several_inputs_come_before_the_label() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.net(a + b)

    data = [[x, x, y] for x, y in batches()]
    doubled = [(2 * x, y) for x, y in batches()]
    assert finetune(Sum(), data).losses == pytest.approx(finetune(network(), doubled).losses)


def test_bf16_trains_in_lower_precision_and_full_precision_can_follow() -> None:
    seen = []
    model = network()
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    low = finetune(model, batches(), mixed_precision="bf16")
    assert set(seen) == {torch.bfloat16}
    assert "forward" not in vars(model)
    assert not any(name.startswith(("_original", "_is_acc")) for name in vars(model))
    assert model[0].weight.dtype == torch.float32
    seen.clear()
    finetune(model, batches())
    assert set(seen) == {torch.float32}
    assert low.losses == pytest.approx(finetune(network(), batches()).losses, rel=0.02)


def test_trains_where_the_caller_has_switched_gradients_off() -> None:
    expected = finetune(network(), batches(), epochs=0.5).losses
    with torch.no_grad():
        assert finetune(network(), batches(), epochs=0.5).losses == expected
        assert not torch.is_grad_enabled()
    model, data = network(), batches()
    with torch.inference_mode():
        assert finetune(model, data, epochs=0.5).losses == expected


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ispasp\[train\]'"):
        finetune(network(), batches())


def test_an_accelerator_of_the_caller_keeps_its_accumulation() -> None:
    accelerate = pytest.importorskip("accelerate")
    try:
        own = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
        finetune(network(), batches(), epochs=0.5)
        assert own.gradient_accumulation_steps == 4
        with pytest.raises(InputError, match="accelerate refuses mixed_precision='bf16'"):
            finetune(network(), batches(), mixed_precision="bf16")
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


def test_only_what_requires_gradients_changes() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    finetune(model, batches(), recipe=Sgd(lr=0.1))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)
    assert all(p.grad is None for p in model.parameters())


def test_modes_and_random_numbers_are_left_alone_even_after_an_error() -> None:
    def failing(output: Tensor, batch: Any) -> Tensor:
        raise RuntimeError("stop")

    model = network(norm=True)
    model[1].eval()
    for loss in (None, failing):
        states = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy(), random.getstate()
        if loss is None:
            finetune(model, batches(), epochs=0.5)
        else:
            with pytest.raises(RuntimeError, match="stop"):
                finetune(model, batches(), loss=loss, mixed_precision="bf16")
        assert torch.equal(states[0], torch.get_rng_state())
        assert np.array_equal(states[1], np.random.get_state(legacy=False)["state"]["key"])
        assert states[2] == random.getstate()
        assert [module.training for module in model] == [True, False, True, True]
        assert "forward" not in vars(model)


def test_the_seed_decides_shuffling_and_dropout() -> None:
    def trained(seed: int) -> Tensor:
        model = network(dropout=0.5)
        loader = DataLoader(TensorDataset(*examples()), batch_size=8, shuffle=True)
        torch.rand(1)  # what the caller draws must not matter
        finetune(model, loader, epochs=2, recipe=Sgd(lr=0.1), seed=seed)
        return parameters(model)

    assert torch.equal(trained(3), trained(3))
    assert not torch.equal(trained(3), trained(4))


def test_every_epoch_is_shuffled_anew() -> None:
    orders: list[int] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        orders.extend(batch[1].tolist())
        return output.square().mean()

    loader = DataLoader(TensorDataset(examples(12)[0], torch.arange(12)), batch_size=4, shuffle=True)
    finetune(network(), loader, epochs=2, loss=loss)
    assert sorted(orders[:12]) == sorted(orders[12:]) == list(range(12))
    assert orders[:12] != orders[12:]


def test_evaluation_after_every_epoch_changes_nothing() -> None:
    loader = DataLoader(TensorDataset(*examples()), batch_size=8, shuffle=True)
    plain = network(norm=True, dropout=0.5)
    expected = finetune(plain, loader, epochs=2.5, recipe=Sgd(lr=0.1))
    modes: list[bool] = []

    def accuracy(model: nn.Module) -> Tensor:
        modes.append(any(module.training for module in model.modules()) or torch.is_grad_enabled())
        model.train()
        x, y = examples()
        return (model.eval()(x).argmax(1) == y).float().mean() + torch.rand(1).item() * 0

    model = network(norm=True, dropout=0.5)
    result = finetune(model, loader, epochs=2.5, recipe=Sgd(lr=0.1), evaluate=accuracy)
    assert modes == [False, False, False]
    assert list(result.scores) == [6, 12, 15]
    assert result.scores[15] == pytest.approx(float(accuracy(model)))
    assert result.losses == expected.losses
    assert torch.equal(parameters(model), parameters(plain))
    text = str(result)
    assert "score after" in text
    assert [f"│ {rows} " in text for rows in ("1-6", "7-12", "13-15")] == [True] * 3
    assert not expected.scores
    assert "score" not in str(expected)


def test_the_result_prints_itself() -> None:
    text = str(finetune(network(), batches(), epochs=2))
    assert "Sequential: 12 steps, 2 epochs" in text
    assert "│ 11-12 │" in text
    assert text.endswith(
        "Sgd(lr=0.01, momentum=0.9, weight_decay=0.0001, nesterov=False, schedule='cosine', warmup=0.0)"
    )
    assert str(finetune(network(), batches(), epochs=0.1)).count("│") == 4  # one row


def iterator() -> Any:
    yield from batches()


class Six:
    """Gives 6 batches, and says something else."""

    def __init__(self, says: int) -> None:
        self.says = says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Any:
        return iter(batches())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"loader": []}, "the loader is empty"),
    ({"loader": iterator()}, "without a length: pass a DataLoader"),
    ({"loader": Six(5)}, "gave more than the 5 batches"),
    ({"loader": Six(9), "epochs": 2}, r"ended after 6 batches: it must give len\(loader\) = 9"),
    ({"loader": [x for x, _ in batches()]}, "has no labels: yield \\(inputs, labels\\)"),
    ({"loader": [(x,) for x, _ in batches()]}, "or pass loss="),
    ({"loader": [("text", "label")], "loss": lambda o, b: o}, "without tensors"),
    ({"loader": [{"input": x, "target": y} for x, y in batches()]}, "dict with input, target\\) has no labels"),
    ({"loader": [(x, y.int()) for x, y in batches()]}, "labels are int32 \\(8,\\) .*\\(int64\\)"),
    ({"loader": [(x, y + 9) for x, y in batches()]}, "out of bounds\\): yield one whole number from 0"),
    ({"loader": [(x, ["a"] * 8) for x, y in batches()]}, "the labels are a list"),
    ({"model": nn.Linear(6, 1)}, "cross entropy of one number per example is 0"),
    ({"evaluate": lambda model: "good"}, "evaluate gave a str: return one number"),
    ({"evaluate": 1}, "evaluate is a int: pass a function"),
    ({"loss": "mse"}, "loss is a str: pass a function"),
    ({"teacher": "dense"}, "the teacher is a str"),
    ({"epochs": "2"}, "epochs='2'"),
    ({"epochs": 0}, "epochs=0: pass a number above 0"),
    ({"epochs": float("nan")}, "epochs=nan"),
    ({"accumulate": 0}, "accumulate=0: pass a whole number of 1 or more"),
    ({"seed": -1}, "seed=-1"),
    ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ({"recipe": "sgd"}, "pass ispasp.train.Sgd"),
    ({"mixed_precision": "int8"}, "choose None, 'bf16' or 'fp16'"),
    ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
    ({"label_smoothing": 0.1, "loss": lambda o, b: o.mean()}, "smooth the labels in your loss"),
    ({"loss": lambda o, b: o}, "it must be one number"),
    ({"loss": lambda o, b: 3.0}, "the loss is a float"),
    ({"loss": lambda o, b: torch.tensor(1.0)}, "compute it from the output"),
    ({"loss": lambda o, b: o.mean() * float("nan")}, "the loss is nan at step 0.*lower lr"),
    ({"teacher": nn.Linear(6, 4)}, "the model gives \\(8, 3\\), the teacher \\(8, 4\\)"),
    ({"model": nn.Linear(6, 3).requires_grad_(False)}, "call model.requires_grad_\\(True\\)"),
    ({"model": nn.Linear(6, 3, device="meta")}, "bring all of it to one real device"),
    ({"model": "resnet"}, "pass a torch.nn.Module"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_bad_input_is_refused_with_a_remedy(given: dict[str, Any], says: str) -> None:
    arguments = {"model": network(), "loader": batches(), **given}
    with pytest.raises(InputError, match=says):
        finetune(arguments.pop("model"), arguments.pop("loader"), **arguments)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="fp16 works on this device")
def test_fp16_without_a_gpu_is_refused_and_leaves_no_trace() -> None:
    with pytest.raises(InputError, match="mixed_precision='fp16' needs a GPU: pass 'bf16' or None"):
        finetune(network(), batches(), mixed_precision="fp16")
    finetune(network(), batches(), epochs=0.1, mixed_precision="bf16")


def test_the_model_is_no_teacher_of_itself() -> None:
    model = network()
    with pytest.raises(InputError, match="the teacher is the model itself"):
        finetune(model, batches(), teacher=model)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sgd(lr=0), "lr=0"),
        (lambda: Sgd(lr="0.1"), "lr='0.1'"),  # type: ignore[arg-type]
        (lambda: Sgd(momentum=1.0), "momentum=1.0: pass a number from 0 to below 1"),
        (lambda: Sgd(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: Sgd(momentum=0.0, nesterov=True), "nesterov=True needs momentum"),
        (lambda: AdamW(betas=0.9), "pass two numbers"),  # type: ignore[arg-type]
        (lambda: AdamW(betas=(0.9, 1.0)), "betas=1.0"),
        (lambda: AdamW(schedule="cos"), "choose from"),
        (lambda: Sgd(warmup=1.0), "warmup=1.0"),
        (lambda: Teacher(nn.Identity(), temperature=0), "temperature=0"),
        (lambda: Teacher(nn.Identity(), weight=0), "weight=0"),
        (lambda: Teacher("model"), "the teacher is a str"),  # type: ignore[arg-type]
        (lambda: distance(torch.ones(2, 1), torch.ones(2, 1), 1.0), "whose softmax is always 1"),
        (lambda: Objective()(WithOwnLoss(), {"x": torch.ones(1, 6)}), "labels"),
    ],
)
def test_bad_recipes_and_teachers(make: Any, says: str) -> None:
    with pytest.raises((InputError, TypeError), match=says):
        make()
