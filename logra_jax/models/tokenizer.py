"""Text to token ids and back, and chat templates, from a Hugging Face directory.

Reads the same files as `transformers` and gives the same ids and the same rendered
chats, on `tokenizers` and `jinja2` alone.
"""

import json
import operator
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    import jinja2
    import tokenizers

# What `save` carries over. generation_config.json is among them because the ids that
# end an answer are read from it.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


class ChatTokenizer:
    """The tokenizer and the chat template of a Hugging Face directory.

    Example:
        tokenizer = ChatTokenizer.load("SmolLM2-135M-Instruct")
        prompt = tokenizer.encode_chat([{"role": "user", "content": "What is 3 + 5?"}])
        tokenizer.decode([33, 476])
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: "tokenizers.Tokenizer",
        template: "jinja2.Template",
        special_tokens: Mapping[str, str],
        eos_ids: tuple[int, ...],
        pad_id: int,
    ):
        """Take the parts as they are; `ChatTokenizer.load` reads and checks them."""
        self._directory = directory
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._eos_ids = eos_ids
        self._pad_id = pad_id
        self._vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, directory: str | Path) -> "ChatTokenizer":
        """Read tokenizer.json, tokenizer_config.json and, where present, the others.

        The chat template is chat_template.jinja, else `chat_template` of
        tokenizer_config.json (of several named ones, "default").

        Raises:
            ValueError: a file, the chat template or the end-of-sequence token is
                missing, or one of the files cannot be read.
        """
        directory = Path(directory)
        config = _read_json(directory / "tokenizer_config.json")
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        _add_missing_tokens(tokenizer, config)
        special_tokens = {
            role: content
            for role, token in config.items()
            if role.endswith("_token") and (content := _content(token)) is not None
        }
        generation = _read_json(directory / "generation_config.json", optional=True)
        model = _read_json(directory / "config.json", optional=True)
        eos_ids = _eos_ids(tokenizer, directory, generation, model, special_tokens)
        return cls(
            directory,
            tokenizer,
            _compile(_chat_template(directory, config), directory),
            special_tokens,
            eos_ids,
            _pad_id(tokenizer, generation, model, special_tokens, eos_ids),
        )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, without duplicates, never empty.

        All that generation_config.json, config.json (or its `text_config`) and the
        `eos_token` of tokenizer_config.json name, in this order.
        """
        return self._eos_ids

    @property
    def pad_id(self) -> int:
        """The id that fills up short rows; often equal to an id in `eos_ids`.

        A mask that drops every `pad_id` would then drop the answer's end as well.
        """
        return self._pad_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; none is added, special tokens written out are parsed."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of token ids, special tokens left out.

        Bytes that are no whole UTF-8 character become U+FFFD, so that `encode` does not
        always give `ids` back: keep the ids wherever a model has to see them again.
        """
        return self._tokenizer.decode([operator.index(token) for token in ids])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation with the chat template, as `apply_chat_template` does.

        Args:
            messages: mappings with "role" and "content"; keys that hold None are left
                out.
            add_generation_prompt: end with the opening of the assistant's turn.
            **variables: further variables that the template reads, such as
                `enable_thinking` or `tools`.

        Raises:
            ValueError: the template refuses or cannot render these messages.
        """
        import jinja2

        context: dict[str, Any] = {
            "messages": [
                {key: value for key, value in message.items() if value is not None}
                for message in messages
            ],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(self._special_tokens | context | variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"`messages` must be a conversation that the chat template in "
                f"{self._directory} can render, which stopped with: {error}"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of `render(...)`, with no BOS beside the template's own."""
        return self.encode(self.render(messages, add_generation_prompt, **variables))

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's files into `directory`, byte for byte.

        generation_config.json goes along (it names `eos_ids`), config.json does not: it
        belongs to the weights. Files are those on disk now, not at `load`.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            source, target = self._directory / name, directory / name
            if source.is_file() and not (target.exists() and target.samefile(source)):
                # copyfile, not copy: the new file gets the user's own permissions.
                shutil.copyfile(source, target)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; an absent optional file is an empty one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ValueError(
            f"`{path.name}` is missing from {path.parent}: "
            "give a Hugging Face directory that holds the tokenizer's files."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"`{path}` cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"`{path}` must hold a JSON object, got {type(value).__name__}."
        )
    return value


def _read_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ValueError(
            f"`{path.name}` is missing from {path.parent}: a fast tokenizer is needed, "
            "which `transformers` writes with save_pretrained."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ValueError(f"`{path}` cannot be read as a tokenizer: {error}") from error
    # Some files carry settings of the run that made them; a prompt is never cut here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_missing_tokens(
    tokenizer: "tokenizers.Tokenizer", config: Mapping[str, Any]
) -> None:
    """Add the tokens that only tokenizer_config.json knows, under the ids it gives."""
    from tokenizers import AddedToken

    entries = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(key), entry) for key, entry in entries.items()):
        if tokenizer.token_to_id(entry["content"]) is not None:
            continue
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", True),
            special=entry.get("special", False),
        )
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if (got := tokenizer.token_to_id(token.content)) != index:
            raise ValueError(
                f"`added_tokens_decoder` gives {token.content!r} the id {index}, but "
                f"tokenizer.json leaves it {got}: the two files must belong together."
            )


def _content(token: Any) -> str | None:
    """A special token's text, written plainly or as {"content": ...}."""
    return token.get("content") if isinstance(token, Mapping) else token


def _eos_ids(
    tokenizer: "tokenizers.Tokenizer",
    directory: Path,
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> tuple[int, ...]:
    # All of them: some name only a document's end in one place, a turn's in another.
    sources = (generation, model, model.get("text_config") or {})
    values = [source.get("eos_token_id") for source in sources]
    values.append(_special_id(tokenizer, "eos_token", special_tokens))
    ids: list[int] = []
    for value in values:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not ids:
        raise ValueError(
            f"`eos_token` is missing from {directory}: name it in "
            "tokenizer_config.json, or `eos_token_id` in generation_config.json, so "
            "that an answer can end."
        )
    # One token under two names would only be compared twice.
    return tuple(dict.fromkeys(int(index) for index in ids))


def _pad_id(
    tokenizer: "tokenizers.Tokenizer",
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    eos_ids: tuple[int, ...],
) -> int:
    value = _special_id(tokenizer, "pad_token", special_tokens)
    if value is None:
        value = _token_id("pad_token_id", generation, model)
    # Padding is masked wherever it matters, so any valid id does.
    return eos_ids[0] if value is None else int(value)


def _token_id(key: str, generation: Mapping[str, Any], model: Mapping[str, Any]) -> Any:
    # Models of several modalities nest the language model's values.
    for source in (generation, model, model.get("text_config") or {}):
        if source.get(key) not in (None, []):
            return source[key]
    return None


def _special_id(
    tokenizer: "tokenizers.Tokenizer", role: str, special_tokens: Mapping[str, str]
) -> int | None:
    if role not in special_tokens:
        return None
    index = tokenizer.token_to_id(special_tokens[role])
    if index is None:
        raise ValueError(
            f"`{role}` of tokenizer_config.json is {special_tokens[role]!r}, which "
            "tokenizer.json does not hold: the two files must belong together."
        )
    return index


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get(
            "default"
        )
    if template is None:
        raise ValueError(
            f"`chat_template` is missing from {directory}: put the model's template "
            "into chat_template.jinja there (base models have none)."
        )
    return template


def _compile(template: str, directory: Path) -> "jinja2.Template":
    """Compile a chat template with what such templates expect to find.

    Templates come with the weights and are not trusted: they run in jinja2's sandbox.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Let {% generation %}, which marks the model's words, mean its contents."""

        tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"`chat_template` of {directory} must be a Jinja template: {error}"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which a model was never shown.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
