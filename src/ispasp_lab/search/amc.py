"""AMC: widths by reinforcement learning, one hidden dimension after the other (DDPG)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp.budget import WidthProblem, register_search
from ispasp.engine.sites import sites
from ispasp_lab.search.legr import loss_of

_TAU, _DECAY, _BATCH, _MEMORY = 0.01, 0.95, 64, 2000


class Move(NamedTuple):
    """One decision of an episode: state, action, reward, the state after it, and whether it was the last."""

    state: Tensor
    action: float
    reward: float
    after: Tensor
    last: bool


@register_search("amc")
@dataclass(frozen=True)
class AMC:
    """An actor says for each hidden dimension which part stays; its reward is the finished network.

    He, Lin, Liu, Wang, Li, Han (2018), AMC: AutoML for Model Compression and Acceleration on Mobile Devices. As there:
    the state of a layer is (index, outputs, channels, height, width, stride, kernel, its MACs, what is saved so far,
    what is left to go, the last action), scaled to [0, 1]; actor and critic have two hidden layers of 300; actions are
    drawn from a truncated normal of spread 0.5, which shrinks by 0.95 in each episode after `explore`; an action may
    not be so large that the limit is out of reach even if all later dimensions are as narrow as allowed; the reward is
    that of the whole episode for all its moves, less a running mean.

    Where we leave the paper: the reward is minus the divergence, relative to that of the start, or `evaluate(network)`;
    widths are those of hidden dimensions, and the units are chosen by `method`. The paper runs 100 episodes of
    exploration and 300 more.

    >>> AMC(episodes=20, explore=5)
    AMC(episodes=20, explore=5, narrowest=0.2, seed=0, evaluate=None)
    """

    episodes: int = 400
    explore: int = 100
    narrowest: float = 0.2
    seed: int = 0
    evaluate: Callable[[nn.Module], float] | None = None

    def __call__(self, problem: WidthProblem) -> dict[str, int]:
        """The best widths of all episodes."""
        layers = Layers.of(problem, self.narrowest)
        scale = abs(loss_of(problem, problem.start, self.evaluate)) or 1.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            agent = Agent(layers.states.shape[1] + 3)
            best: tuple[float, dict[str, int]] = (float("inf"), {})
            mean = 0.0
            for episode in range(self.episodes):
                spread = 0.5 * _DECAY ** max(0, episode - self.explore)
                widths, states, actions = layers.episode(problem, agent, spread)
                loss = loss_of(problem, widths, self.evaluate)
                best = min(best, (loss, widths), key=lambda each: each[0])
                reward = -loss / scale
                mean = reward if episode == 0 else 0.95 * mean + 0.05 * reward
                agent.remember(states, actions, reward - mean)
                if episode >= min(self.explore, self.episodes // 4):
                    for _ in states:
                        agent.learn()
        return best[1]


@dataclass(frozen=True, eq=False)
class Layers:
    """The fixed part of each hidden dimension's state, and the episodes through them. states (dimensions, 8)"""

    states: Tensor
    macs: dict[str, int]
    whole: int
    narrow: Mapping[str, int]

    @staticmethod
    def of(problem: WidthProblem, narrowest: float) -> Layers:
        """Features of the first consumer of every hidden dimension, and the MACs that it and its producers cost."""
        whole = problem.count(problem.units)
        rows, macs = [], {}
        for index, name in enumerate(problem.units):
            macs[name] = whole - problem.count({**problem.units, name: problem.least[name]})
            rows.append([float(index), *_shape(problem, name), float(macs[name])])
        states = torch.tensor(rows)
        low, high = states.amin(0), states.amax(0)
        wanted = {name: problem.fit(name, round(narrowest * units)) for name, units in problem.units.items()}
        narrow = wanted if problem.count(wanted) <= problem.limit else problem.least
        return Layers((states - low) / (high - low).clamp_min(1e-12), macs, whole, narrow)

    def episode(
        self, problem: WidthProblem, agent: Agent, spread: float
    ) -> tuple[dict[str, int], list[Tensor], list[float]]:
        """One network: its widths, the state at each decision, and the actions that were possible."""
        widths, states, actions, last = dict(self.narrow), [], [], 1.0
        for index, (name, units) in enumerate(problem.units.items()):
            decided = {n: widths[n] if k < index else problem.units[n] for k, n in enumerate(problem.units)}
            saved = 1 - problem.count(decided) / self.whole
            left = sum(self.macs[n] for n in list(problem.units)[index + 1 :]) / self.whole
            state = torch.cat([self.states[index], torch.tensor([saved, left, last])])
            most = problem.widest(name, widths)
            width = min(problem.fit(name, round(agent.act(state, spread) * units)), most)
            widths[name] = max(width, self.narrow[name])
            last = widths[name] / units
            states.append(state)
            actions.append(last)
        return widths, states, actions


def _shape(problem: WidthProblem, name: str) -> list[float]:
    """Outputs, channels, height, width, stride and kernel of the first layer that reads a hidden dimension."""
    site = sites(problem.survey.analysis, [name])[0]
    node = site.contraction.node
    weight = problem.model.get_parameter(sorted(site.contraction.parameters, key=lambda p: not p.endswith("weight"))[0])
    out = node.meta["val"].shape
    size = [float(n) for n in out[2:4]] if len(out) == 4 else [1.0, 1.0]
    module = problem.model.get_submodule(site.path) if "," not in site.path else None
    stride = getattr(module, "stride", 1)
    kernel = float(weight.shape[-1]) if weight.ndim == 4 else 1.0
    return [
        float(weight.shape[0]),
        float(problem.units[name]),
        *size,
        float(stride[0] if isinstance(stride, tuple) else stride),
        kernel,
    ]


def _network(inputs: int, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1), last)


@dataclass(eq=False)
class Agent:
    """Deep deterministic policy gradient (Lillicrap et al. 2016)."""

    features: int
    memory: deque[Move] = field(default_factory=lambda: deque(maxlen=_MEMORY))

    def __post_init__(self) -> None:
        self.actor, self.critic = _network(self.features, nn.Sigmoid()), _network(self.features + 1, nn.Identity())
        self.slow_actor, self.slow_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), 1e-4)
        self.critic_steps = torch.optim.Adam(self.critic.parameters(), 1e-3)

    @torch.no_grad()
    def act(self, state: Tensor, spread: float) -> float:
        """The actor's action with noise: a normal, truncated to [0, 1]."""
        mean = float(self.actor(state))
        for _ in range(100):
            action = mean + spread * float(torch.randn(()))
            if 0 <= action <= 1:
                return action
        return mean

    def remember(self, states: list[Tensor], actions: list[float], reward: float) -> None:
        """All moves of an episode get its reward."""
        ends = [*states[1:], torch.zeros_like(states[0])]
        for k, (state, action, after) in enumerate(zip(states, actions, ends, strict=True)):
            self.memory.append(Move(state, action, reward, after, k == len(states) - 1))

    @torch.enable_grad()
    def learn(self) -> None:
        """One step of critic and actor on moves drawn from memory; the slow copies follow."""
        chosen = torch.randint(len(self.memory), (min(_BATCH, len(self.memory)),)).tolist()
        moves = [self.memory[i] for i in chosen]
        s, after = torch.stack([m.state for m in moves]), torch.stack([m.after for m in moves])
        a = torch.tensor([[m.action] for m in moves])
        r, goes_on = torch.tensor([[m.reward] for m in moves]), torch.tensor([[float(not m.last)] for m in moves])
        with torch.no_grad():
            target = r + goes_on * self.slow_critic(torch.cat([after, self.slow_actor(after)], 1))
        self.critic_steps.zero_grad()
        functional.mse_loss(self.critic(torch.cat([s, a], 1)), target).backward()  # type: ignore[no-untyped-call]
        self.critic_steps.step()
        self.actor_steps.zero_grad()
        (-self.critic(torch.cat([s, self.actor(s)], 1)).mean()).backward()
        self.actor_steps.step()
        with torch.no_grad():
            for slow, fast in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
                for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                    p.lerp_(q, _TAU)
