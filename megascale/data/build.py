"""From the data flags of a run to its training and validation samples."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.config.data_flags import parse_data_path, parse_split
from megascale.config.schema import RunConfig
from megascale.data.blend import Blend
from megascale.data.indexed import IndexedDataset
from megascale.data.samples import SampleSource, ShardedSamples
from megascale.data.sidecar import Sidecar, TokenizerRecord, read_sidecar, require_belongs, sidecar_path
from megascale.data.split import split_documents
from megascale.data.tokenizer import Tokenizer
from megascale.utils.errors import UserError


@dataclass(frozen=True)
class Part:
    """The documents of one data set that serve one purpose, and their share of what is read for it."""

    weight: float
    samples: ShardedSamples


@dataclass(frozen=True)
class Sources:
    """What a run reads.

    train: endless. valid: the same samples in the same order at each validation; None when there are none.
    eod_id: the end-of-document token, None when neither a tokenizer nor a record beside the data tells it.
    """

    train: SampleSource
    valid: SampleSource | None
    eod_id: int | None
    train_parts: tuple[Part, ...]
    valid_parts: tuple[Part, ...]
    num_train_samples: int
    num_valid_samples: int
    notes: tuple[str, ...]

    def describe(self) -> str:
        """Data sets, documents, tokens, samples per epoch and epochs, several lines."""
        lines = ["training data"]
        lines += _describe_parts(self.train_parts, self.train, self.num_train_samples)
        lines.append(f"  the run reads {self.num_train_samples:,} samples")
        if self.valid is None:
            lines.append("validation data: none")
        else:
            lines.append("validation data")
            lines += _describe_parts(self.valid_parts, self.valid, None)
            most = self.valid.samples_per_epoch
            read = f"the first {self.num_valid_samples:,}" if self.num_valid_samples < most else f"all {most:,}"
            lines.append(f"  each validation reads {read} samples")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def build_sources(config: RunConfig, tokenizer: Tokenizer | None) -> Sources:
    """Opens every data set of a resolved configuration and lays out its samples.

    --split divides each training set by documents, unless --valid-data-path names validation sets. Weights blend the
    sets; without weights each is read in proportion to its samples.

    Raises:
        UserError: a data set is missing, damaged, too small or of another tokenizer.
    """
    data, train = config.data, config.train
    train_paths = parse_data_path(data.data_path)
    valid_paths = parse_data_path(data.valid_data_path, "--valid-data-path")
    datasets = {prefix: open_dataset(prefix) for _, prefix in [*train_paths, *valid_paths]}
    sidecars = {prefix: read_sidecar(prefix) for prefix in datasets}
    for prefix, sidecar in sidecars.items():
        if sidecar is not None:
            require_belongs(sidecar, datasets[prefix])
    record = _agreed_tokenizer(sidecars, tokenizer)
    if record is not None and config.model.vocab_size is not None and record.vocab_size > config.model.vocab_size:
        raise UserError(
            f"--vocab-size {config.model.vocab_size} is less than the {record.vocab_size} tokens of the vocabulary "
            f"that {', '.join(prefix for prefix in sidecars if sidecars[prefix])} was prepared with"
        )

    def training(prefix: str, documents: NDArray[np.int64] | None) -> ShardedSamples:
        return ShardedSamples(datasets[prefix], documents, data.seq_length, data.num_shards, train.seed)

    def validation(prefix: str, documents: NDArray[np.int64] | None, flag: str) -> ShardedSamples:
        try:
            return ShardedSamples(datasets[prefix], documents, data.seq_length, 1, train.seed, shuffle=False)
        except UserError as error:
            raise UserError(f"{flag}, validation part: {error}") from None

    train_parts: list[Part] = []
    valid_parts: list[Part] = []
    if valid_paths:
        train_parts = [_part(weight, training(prefix, None)) for weight, prefix in train_paths]
        valid_parts = [_part(weight, validation(prefix, None, "--valid-data-path")) for weight, prefix in valid_paths]
    else:
        ratios = parse_split(data.split)
        for weight, prefix in train_paths:
            documents = _split(datasets[prefix], ratios, data.split_seed)
            train_parts.append(_part(weight, training(prefix, documents[0])))
            if ratios[1] > 0:
                valid_parts.append(_part(weight, validation(prefix, documents[1], f"--split {data.split}")))
    trained, validated = ({prefix for _, prefix in paths} for paths in (train_paths, valid_paths))
    return Sources(
        train=_blend(train_parts),
        valid=_blend(valid_parts) if valid_parts else None,
        eod_id=tokenizer.eod_id if tokenizer is not None else record.eod_id if record is not None else None,
        train_parts=tuple(train_parts),
        valid_parts=tuple(valid_parts),
        num_train_samples=train.train_iters * train.global_batch_size,
        num_valid_samples=train.eval_iters * train.global_batch_size,
        notes=tuple(_notes(sidecars, tokenizer, shared=sorted(trained & validated))),
    )


def stored_vocab_size(config: RunConfig) -> int | None:
    """The vocabulary size that the records beside the data sets tell, None where there are no records.

    Raises:
        UserError: a data set is missing, or two were prepared with different tokenizers.
    """
    paths = [
        *parse_data_path(config.data.data_path),
        *parse_data_path(config.data.valid_data_path, "--valid-data-path"),
    ]
    for _, prefix in paths:
        _require_pair(prefix)
    record = _agreed_tokenizer({prefix: read_sidecar(prefix) for _, prefix in paths}, None)
    return record.vocab_size if record is not None else None


def open_dataset(prefix: str) -> IndexedDataset:
    """Opens a data set; a missing one is answered with the nearest that exists.

    Raises:
        UserError: it is missing or damaged.
    """
    _require_pair(prefix)
    return IndexedDataset(prefix)


def _require_pair(prefix: str) -> None:
    missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if not missing:
        return
    directory = Path(prefix).parent
    there = sorted(str(path.with_suffix("")) for path in directory.glob("*.idx")) if directory.is_dir() else []
    # Best guesses first: the prefix itself with an ending too many or too few, then what is spelled alike.
    likely = [name for name in there if name.startswith(prefix) or prefix.startswith(name)]
    likely = likely or difflib.get_close_matches(prefix, there, n=1, cutoff=0.5)
    if prefix in there:
        advice = "the other file of the pair is there; copy or prepare the data set again"
    elif likely:
        advice = f"did you mean {likely[0]}? (give the path without .bin or .idx)"
    elif there:
        advice = f"in {directory} there is {', '.join(there[:3])}"
    else:
        what = "holds no .idx file" if directory.is_dir() else "does not exist"
        advice = f"{directory} {what}; tools/preprocess_data.py makes data sets"
    raise UserError(f"data set {prefix}: {' and '.join(missing)} not found; {advice}")


def _agreed_tokenizer(sidecars: dict[str, Sidecar | None], tokenizer: Tokenizer | None) -> TokenizerRecord | None:
    """The tokenizer that all records name, checked against the run's; None without records."""
    known = [(prefix, sidecar.tokenizer) for prefix, sidecar in sidecars.items() if sidecar is not None]
    for prefix, record in known:
        if tokenizer is not None and record.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"data set {prefix} was prepared with a {record.tokenizer_type} of {record.vocab_size} tokens "
                f"(fingerprint {record.fingerprint[:12]}, see {sidecar_path(prefix)}), but the run's tokenizer is a "
                f"{tokenizer.tokenizer_type} of {tokenizer.vocab_size} tokens (fingerprint "
                f"{tokenizer.fingerprint[:12]}): its ids would mean other text. Give the tokenizer files that the data "
                "was prepared with, or prepare it again"
            )
        if record.fingerprint != known[0][1].fingerprint:
            raise UserError(
                f"data sets {known[0][0]} and {prefix} were prepared with different tokenizers (fingerprints "
                f"{known[0][1].fingerprint[:12]} and {record.fingerprint[:12]}); prepare one of them again"
            )
    return known[0][1] if known else None


def _split(dataset: IndexedDataset, ratios: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    try:
        return split_documents(dataset.num_documents, ratios, seed)
    except UserError as error:
        raise UserError(f"data set {dataset.prefix}: {error}") from None


def _part(weight: float | None, samples: ShardedSamples) -> Part:
    return Part(samples.samples_per_epoch if weight is None else weight, samples)


def _blend(parts: Sequence[Part]) -> SampleSource:
    if len(parts) == 1:
        return parts[0].samples
    return Blend([part.weight for part in parts], [part.samples for part in parts])


def _describe_parts(parts: Sequence[Part], source: SampleSource, num_samples: int | None) -> list[str]:
    """A line for each data set; `num_samples` of the whole source give the number of epochs."""
    reads = source.counts(num_samples or 0) if isinstance(source, Blend) else (num_samples or 0,)
    total = sum(part.weight for part in parts)
    lines = []
    for part, read in zip(parts, reads, strict=True):
        samples = part.samples
        line = (
            f"  {samples.dataset.prefix}: {samples.num_documents:,} documents, {samples.num_tokens:,} tokens, "
            f"{samples.samples_per_epoch:,} samples an epoch ({samples.num_dropped_tokens:,} tokens left over)"
        )
        if len(parts) > 1:
            line += f", share {part.weight / total:.2%}"
        if num_samples is not None:
            line += f", {read / samples.samples_per_epoch:.2f} epochs"
        lines.append(line)
    return lines


def _notes(sidecars: dict[str, Sidecar | None], tokenizer: Tokenizer | None, shared: Sequence[str]) -> list[str]:
    """What a user should know and no check can decide."""
    notes = [f"{prefix} is both trained on and validated on" for prefix in shared]
    for prefix, sidecar in sidecars.items():
        if sidecar is None:
            what = "its tokenizer cannot be compared with the run's" if tokenizer else "its tokenizer is unknown"
            notes.append(f"{prefix} has no {Path(sidecar_path(prefix)).name} beside it, so {what}")
        elif not sidecar.append_eod:
            notes.append(f"{prefix} was prepared without --append-eod: nothing marks where a document ends")
    return notes
