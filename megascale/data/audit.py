"""Which documents samples are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale.data.blend import Blend
from megascale.data.samples import SampleSource, ShardedSamples, Span


@dataclass(frozen=True)
class SampleOrigin:
    """Where one sample comes from: a data set and the pieces of its documents, in order.

    number: of the sample in the whole stream. epoch: how often the data set had been read to its end before.
    """

    number: int
    prefix: str
    epoch: int
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        pieces = ", ".join(f"document {span.document} [{span.start}:{span.stop}]" for span in self.spans)
        return f"sample {self.number}: {self.prefix} epoch {self.epoch}: {pieces}"


def origins(source: SampleSource, numbers: range) -> Iterator[SampleOrigin]:
    """Where each of these samples comes from; a pure function of the configuration, nothing need have been recorded."""
    for number in numbers:
        part, within = source, number
        while isinstance(part, Blend):
            index, within = part.locate(within)
            part = part.sources[index]
        assert isinstance(part, ShardedSamples), "samples come from data sets"
        yield SampleOrigin(
            number, str(part.dataset.prefix), within // part.samples_per_epoch, tuple(part.spans(within))
        )
