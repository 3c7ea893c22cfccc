"""Text to token ids and back: GPT-2's byte-level BPE, or whatever a Hugging Face `tokenizer.json` describes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from megascale.data.cutting import PIECE_CHARACTERS, pieces
from megascale.utils.errors import UserError
from megascale.utils.files import atomic_writer

END_OF_TEXT: Final = "<|endoftext|>"
# What tokenizers call the token between documents, in the order in which we look.
END_OF_DOCUMENT_NAMES: Final = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<|endofdocument|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|eot|>",
    "<|im_end|>",
)
TokenizerType = Literal["GPT2BPETokenizer", "HuggingFaceTokenizer"]
# Pieces of long documents encoded at once, so that memory stays bounded whatever a document's length.
_PIECES_AT_ONCE: Final = 16


@dataclass(frozen=True)
class TokenizerFiles:
    """Which tokenizer: enough to build it anew in another process."""

    tokenizer_type: TokenizerType | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None


class Tokenizer:
    """Encodes text as it stands: no special tokens are added, and text never becomes one.

    vocab_size: one more than the largest id. eod_id: the token between documents, spelled `eod_token`.
    fingerprint: SHA-256 of the model, the same wherever the files lie and however they are formatted.
    """

    def __init__(self, description: Mapping[str, Any], source: str, tokenizer_type: TokenizerType) -> None:
        """Builds it from the content of a `tokenizer.json` that came from `source` (a file name for messages)."""
        # Truncation and padding would change documents, BPE dropout would make the ids random.
        settings = {key: value for key, value in description.items() if key not in ("truncation", "padding")}
        if isinstance(settings.get("model"), dict) and "dropout" in settings["model"]:
            settings["model"] = dict(settings["model"], dropout=None)
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(settings))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"{source} is not a tokenizer that `tokenizers` {tokenizers.__version__} reads: {error}"
            ) from None
        # An end-of-document token typed inside a document must not end it.
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{source} describes a tokenizer with an empty vocabulary")
        _check_covers_all_text(settings, source)
        self.tokenizer_type = tokenizer_type
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eod_token = next((name for name in END_OF_DOCUMENT_NAMES if name in vocabulary), "")
        if not self.eod_token:
            raise UserError(
                f"{source} has no end-of-document token; one of {', '.join(END_OF_DOCUMENT_NAMES)} is needed"
            )
        self.eod_id: int = vocabulary[self.eod_token]
        canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
        self._may_cut = _splits_like_gpt2(settings)

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each text, int32; a document of any length takes little more memory than its own ids."""
        parts: list[list[NDArray[np.int32]]] = [[] for _ in texts]
        waiting: list[tuple[int, str]] = []
        waiting_characters = 0
        for owner, text in enumerate(texts):
            for piece in pieces(text) if self._may_cut else (text,):
                waiting.append((owner, piece))
                waiting_characters += len(piece)
                if waiting_characters >= _PIECES_AT_ONCE * PIECE_CHARACTERS:
                    self._encode_waiting(waiting, parts)
                    waiting, waiting_characters = [], 0
        self._encode_waiting(waiting, parts)
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self._model.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def _encode_waiting(self, waiting: list[tuple[int, str]], parts: list[list[NDArray[np.int32]]]) -> None:
        texts = [text for _, text in waiting]
        # The fast call is the same but for character offsets, which nobody needs here.
        encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        for (owner, _), encoding in zip(waiting, encodings, strict=True):
            parts[owner].append(np.array(encoding.ids, dtype=np.int32))


def build_tokenizer(
    tokenizer_type: TokenizerType | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
) -> Tokenizer:
    """The tokenizer that the flags describe; without `tokenizer_type` the files given decide.

    Raises:
        UserError: files are missing, unreadable or do not belong together, or the flags contradict each other.
    """
    if tokenizer_type is None:
        if bool(tokenizer_model) == bool(vocab_file or merge_file):
            raise UserError(
                "say which tokenizer: --vocab-file and --merge-file (GPT2BPETokenizer), or --tokenizer-model with a "
                f"tokenizer.json (HuggingFaceTokenizer); {'not both' if tokenizer_model else 'none was given'}"
            )
        tokenizer_type = "HuggingFaceTokenizer" if tokenizer_model else "GPT2BPETokenizer"
    if tokenizer_type == "GPT2BPETokenizer":
        if not vocab_file or not merge_file or tokenizer_model:
            raise UserError("--tokenizer-type GPT2BPETokenizer takes --vocab-file and --merge-file, and nothing else")
        return Tokenizer(_describe_gpt2(vocab_file, merge_file), f"{vocab_file} with {merge_file}", tokenizer_type)
    if tokenizer_type == "HuggingFaceTokenizer":
        if not tokenizer_model or vocab_file or merge_file:
            raise UserError("--tokenizer-type HuggingFaceTokenizer takes --tokenizer-model, and nothing else")
        path = Path(tokenizer_model)
        path = path / "tokenizer.json" if path.is_dir() else path
        return Tokenizer(_read_json_object(str(path), "--tokenizer-model"), str(path), tokenizer_type)
    raise UserError(f"--tokenizer-type {tokenizer_type} is unknown; choose GPT2BPETokenizer or HuggingFaceTokenizer")


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, output: str | Path, min_frequency: int = 2, show_progress: bool = False
) -> Tokenizer:
    """Learns a byte-level BPE in GPT-2's form from `texts` and saves it as a `tokenizer.json` at `output`.

    The vocabulary holds <|endoftext|> (id 0), the 256 bytes and as many merges as `vocab_size` leaves room for, fewer
    if the texts do not have so many pairs that occur `min_frequency` times. The same texts give the same file.

    Raises:
        UserError: `vocab_size` is below 257.
    """
    if vocab_size < 257:
        raise UserError(f"--vocab-size {vocab_size} must be at least 257: 256 bytes and {END_OF_TEXT}")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    model.train_from_iterator(_short_texts(texts), trainer=trainer)
    with atomic_writer(Path(output), "w") as file:
        file.write(model.to_str(pretty=True))
    return build_tokenizer(tokenizer_model=str(output))


def _short_texts(texts: Iterable[str]) -> Iterator[str]:
    """Long texts in pieces, which have the same words, so that the trainer's memory stays bounded."""
    for text in texts:
        yield from pieces(text)


def _describe_gpt2(vocab_file: str, merge_file: str) -> dict[str, Any]:
    """The `tokenizer.json` content for GPT-2's two files, checked against each other."""
    vocabulary = _read_json_object(vocab_file, "--vocab-file")
    if any(not isinstance(token, int) or isinstance(token, bool) for token in vocabulary.values()):
        raise UserError(f"--vocab-file {vocab_file} must map each token to its number")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise UserError(f"--vocab-file {vocab_file} gives two tokens the same number")
    if END_OF_TEXT not in vocabulary:
        raise UserError(f"--vocab-file {vocab_file} has no {END_OF_TEXT}, the token GPT-2 puts between documents")
    merges = []
    for number, line in enumerate(_read_text(merge_file, "--merge-file").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"--merge-file {merge_file}, line {number}: {line[:60]!r} is not a pair of tokens")
        for token in (*pair, "".join(pair)):
            if token not in vocabulary:
                raise UserError(
                    f"--merge-file {merge_file}, line {number} needs the token {token!r}, which --vocab-file "
                    f"{vocab_file} does not have: the two are not of the same tokenizer"
                )
        merges.append(pair)
    if not merges:
        raise UserError(f"--merge-file {merge_file} holds no merges")
    return {
        "version": "1.0",
        "added_tokens": [_special_token(END_OF_TEXT, vocabulary[END_OF_TEXT])],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _special_token(content: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}


def _check_covers_all_text(description: Mapping[str, Any], source: str) -> None:
    """Refuses a BPE model that would drop characters it does not know without a word."""
    model = description.get("model") or {}
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return
    stages = _stages(description.get("pre_tokenizer")) + _stages(description.get("normalizer"))
    byte_level = any(stage.get("type") == "ByteLevel" for stage in stages)
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(model.get("vocab", ())) if byte_level else set()
    if missing or not byte_level:
        lack = f"lacks {len(missing)} of the 256 bytes" if byte_level else "has neither bytes nor an unknown token"
        raise UserError(f"{source}: the vocabulary {lack}, so characters outside it would vanish from the text")


def _splits_like_gpt2(description: Mapping[str, Any]) -> bool:
    """Whether text is split by GPT-2's expression and nothing else, so that `pieces` may cut it."""
    splitter = description.get("pre_tokenizer") or {}
    return (
        description.get("normalizer") is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter.get("add_prefix_space", True)
        and all(token.get("special") for token in description.get("added_tokens") or ())
    )


def _stages(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if not component:
        return []
    steps = component.get("pretokenizers") or component.get("normalizers") or [component]
    return list(steps)


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _read_json_object(path: str, flag: str) -> dict[str, Any]:
    text = _read_text(path, flag)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{flag} {path} must hold a JSON object, not a {type(content).__name__}")
    return content
