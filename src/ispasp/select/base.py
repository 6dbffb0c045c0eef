"""What every selector is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ispasp.types import Selection, Statistics


class Selector(ABC):
    """A rule that decides which units stay.

    Subclasses are frozen dataclasses: their fields are the options. `needs` names what has to be there for them:

    - "moment", "magnitude", "gram" and the names of `register_statistic`: statistics of what each consumer gets;
    - "sensitivity": a statistic that takes a loss and a backward pass, see `types.Sensitivity`;
    - "task": the task loss of any choice of units, see `types.Statistics`;
    - "producers": weights of the layers that make the units, no data, see `types.Producer`.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    @property
    def parts(self) -> int:
        """How many mini-batches it wants to see apart, in `Statistics.parts`; 0: only the sum of all."""
        return 0

    @abstractmethod
    def select(self, statistics: Statistics, keep: float | int) -> Selection:
        """Choose `keep` (a fraction or a number) of the units of one hidden dimension.

        >>> import torch
        >>> from ispasp.calibrate import measure
        >>> from ispasp.select import TopK
        >>> from ispasp.types import LinearConsumer
        >>> reading = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 2.0]]), TopK.needs)
        >>> TopK().select(Statistics(3, (reading,)), keep=1).kept
        (1,)
        """

    def path(self, statistics: Statistics, widths: Sequence[int]) -> list[tuple[int, ...]]:
        """The units that `select` keeps at each width, without residuals.

        Override it where widths can share work: one ordering, one sequence of removals.

        >>> import torch
        >>> from ispasp.calibrate import measure
        >>> from ispasp.select import TopK
        >>> from ispasp.types import LinearConsumer
        >>> reading = measure(LinearConsumer(torch.eye(3)), torch.tensor([[1.0, 3.0, 2.0]]), TopK.needs)
        >>> TopK().path(Statistics(3, (reading,)), [1, 2])
        [(1,), (1, 2)]
        """
        return [self.select(statistics, width).kept for width in widths]

    def factors(self, statistics: Statistics, kept: Sequence[int]) -> tuple[float, ...]:
        """Factors that belong to a choice, for what all consumers read of each kept unit in turn; (): none.

        They are part of the method (see `ThiNet`) and stand in for compensation, where there is none.

        >>> from ispasp.select import TopK
        >>> from ispasp.types import LinearConsumer, Reading
        >>> import torch
        >>> TopK().factors(Statistics(2, (Reading(LinearConsumer(torch.eye(2))),)), kept=(0,))
        ()
        """
        return ()
