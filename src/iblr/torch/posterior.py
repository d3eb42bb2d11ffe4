"""The distribution of a network's weights, apart from the optimiser that found it."""

import dataclasses
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class MeanField:
    """A Gaussian with one mean and one precision for every entry of every parameter.

    Attributes:
        mean: one tensor a parameter, in the optimiser's order.
        precision: likewise.

    Example:
        >>> import torch
        >>> from iblr.torch import MeanField
        >>> q = MeanField([torch.zeros(2)], [torch.full((2,), 4.0)])
        >>> q.standard_deviation[0]
        tensor([0.5000, 0.5000])
    """

    mean: Sequence[Tensor]
    precision: Sequence[Tensor]

    def __post_init__(self):
        for index, (mean, precision) in enumerate(zip(self.mean, self.precision, strict=True)):
            if mean.shape != precision.shape:
                raise ValueError(
                    f"MeanField: mean {index} has the shape {tuple(mean.shape)}, its precision "
                    f"{tuple(precision.shape)}. Give one precision for every entry."
                )
            if not (precision > 0).all():
                raise ValueError(f"MeanField: precision {index} has entries that are not positive.")

    @property
    def standard_deviation(self) -> list[Tensor]:
        """1/sqrt(precision)."""
        return [precision.rsqrt() for precision in self.precision]

    def sample(self, generator: torch.Generator | None = None) -> list[Tensor]:
        """Weights, one tensor a parameter."""
        return [
            torch.addcmul(m, _noise_like(m, generator), sd)
            for m, sd in zip(self.mean, self.standard_deviation, strict=True)
        ]

    @torch.no_grad()
    def write(self, parameters: Iterable[Tensor], values: Sequence[Tensor] | None = None) -> None:
        """Put the mean, or a sample, into a network's parameters, in the optimiser's order."""
        for parameter, value in zip(parameters, values or self.mean, strict=True):
            if parameter.shape != value.shape:
                raise ValueError(
                    f"MeanField.write(): a value of shape {tuple(value.shape)} for a parameter of "
                    f"shape {tuple(parameter.shape)}. Give the parameters in the optimiser's order."
                )
            parameter.copy_(value)

    def merged(self, *others: "MeanField", prior: "MeanField | None" = None) -> "MeanField":
        """The product of this with others that were found from the same prior on other data.

        Precisions add up, less those of the prior that were counted more than once; without
        `prior`, as if it were flat. Where that leaves no precision, the data of one part spoke
        against another's, and the prior's own is kept.
        """
        means, precisions = [], []
        for index in range(len(self.mean)):
            every = [(q.mean[index], q.precision[index]) for q in (self, *others)]
            total = torch.stack([p for _, p in every]).sum(0)
            weighted = torch.stack([m * p for m, p in every]).sum(0)
            if prior is not None:
                extra = len(others) * prior.precision[index]
                left = total - extra
                total = torch.where(left > 0, left, prior.precision[index])
                weighted = torch.where(
                    left > 0,
                    weighted - extra * prior.mean[index],
                    total * prior.mean[index],
                )
            means.append(weighted / total)
            precisions.append(total)
        return MeanField(means, precisions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """To a file that `load` reads; on the CPU."""
        kept = {"mean": self.mean, "precision": self.precision}
        torch.save({name: [t.cpu() for t in tensors] for name, tensors in kept.items()}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MeanField":
        """What `save` wrote; only tensors are read, no code."""
        kept = torch.load(path, weights_only=True)
        return cls(kept["mean"], kept["precision"])


def _noise_like(mean: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.randn_like(mean)
    return torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean)
