"""The metadata of a GGUF file, and its tokenizer as Hugging Face's files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# GGUF's token types (llama.cpp's numbering): those that the tokenizer must never split,
# and rows of the embedding that stand for nothing.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


class Metadata:
    """A GGUF file's key-value pairs, decoded when they are asked for."""

    def __init__(self, fields: Mapping[str, Any], file: str):
        self._fields = fields
        self.file = file

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ValueError(
                f"`{key}` is missing from the metadata of {self.file}; convert the "
                "model again with a newer llama.cpp."
            )
        return self._fields[key].contents()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any) -> Any:
        """The value, or ``default`` where there is none."""
        return self[key] if key in self._fields else default

    def float32(self, key: str, default: float | None = None) -> float:
        """The shortest decimal of a stored fp32: 1e-05, not 9.999999747378752e-06."""
        if default is not None and key not in self:
            return default
        return float(str(np.float32(self[key])))


def _byte_level(*, splits: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits,
    }


def _pieces(digits: str) -> list[dict[str, Any]]:
    """Text in contractions, words, numbers, punctuation and blanks."""
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            rf"\p{{N}}{digits}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(splits=False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
# By `tokenizer.ggml.pre`: how text is split before pieces are merged.
_SPLITS = {
    "smollm": [_DIGITS, _byte_level(splits=True)],
    "qwen2": _pieces(""),
    "llama-bpe": _pieces("{1,3}"),
}


def write_tokenizer(metadata: Metadata, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Raises:
        ValueError: a kind of tokenizer, or of splitting text, that is not supported.
    """
    split = metadata.get("tokenizer.ggml.pre", "default")
    if (kind := metadata["tokenizer.ggml.model"]) != "gpt2":
        raise ValueError(
            f"`tokenizer.ggml.model` of {metadata.file} must be gpt2 (byte-level BPE), "
            f"got {kind}; give the model as a Hugging Face directory."
        )
    if split not in _SPLITS:
        raise ValueError(
            f"`tokenizer.ggml.pre` of {metadata.file} must be one of "
            f"{', '.join(_SPLITS)}, got {split}; give the model as a Hugging Face "
            "directory."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        _added_token(index, tokens[index], special=kind == _CONTROL)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer = _tokenizer(metadata, split, tokens, types) | {"added_tokens": added}
    write_json(directory / "tokenizer.json", tokenizer)

    special = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    write_json(directory / "special_tokens_map.json", special)
    template = metadata.get("tokenizer.chat_template", None)
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(token["id"]): {k: v for k, v in token.items() if k != "id"}
                for token in added
            },
            **({} if template is None else {"chat_template": template}),
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            # The generic class takes tokenizer.json as it is; GPT2Tokenizer would put
            # its own pre-tokenizer in the place of the file's.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    )


def _tokenizer(
    metadata: Metadata, split: str, tokens: list[str], types: list[int]
) -> dict[str, Any]:
    used = zip(range(len(tokens)), tokens, types, strict=True)
    merges = [pair.split(" ") for pair in metadata["tokenizer.ggml.merges"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[split]},
        "post_processor": _begin(metadata, tokens),
        "decoder": _byte_level(splits=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 takes a piece that is a token as it is.
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: i for i, token, kind in used if kind != _UNUSED},
            "merges": merges,
        },
    }


def _begin(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    """What puts the first token before a text; nothing where there is to be none."""
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    index = metadata["tokenizer.ggml.bos_token_id"]
    first = tokens[index]
    begin = {"SpecialToken": {"id": first, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            begin,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {first: {"id": first, "ids": [index], "tokens": [first]}},
    }


def _added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON object, as a Hugging Face directory holds it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
