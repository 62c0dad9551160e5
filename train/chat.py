"""Conversations in a tokenizer's chat template, and which of their tokens the assistant says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One conversation as the drafter sees it."""

    input_ids: list[int]
    loss_mask: list[bool]  # true where the target speaks, the end of its turn included


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], speak: bool, tools: list[Any] | None = None
) -> list[int]:
    """Token ids of `messages` in the tokenizer's chat template; `speak` ends them where the assistant begins."""
    told = _apply(tokenizer, messages, tools, add_generation_prompt=speak, return_dict=False)
    return cast(list[int], told)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None, **how: Any) -> Any:
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template; choose an instruct model, or give rows as input_ids and loss_mask"
        )
    plain = [{key: value for key, value in message.items() if key != "ids"} for message in messages]
    try:
        return tokenizer.apply_chat_template(plain, tools=tools, tokenize=True, **how)
    except Exception as error:  # a template is a program from outside: it may raise anything
        begins = str(messages[0].get("content"))[:40] if messages else ""
        raise ValueError(
            f"the chat template refuses the conversation that begins {begins!r} ({error}); drop such rows, or merge what it does not know into the user's turns"
        ) from None


def example(tokenizer: PreTrainedTokenizerBase, row: Row, ends: frozenset[int], reasoning: bool = True) -> Example:
    """Token ids and loss mask of `row`: each assistant turn up to and including its end token.

    Turns are told apart by the template's generation markers where it has them, else by rendering what stands before
    them. Either way what is marked reads as what the assistant said, or a ValueError names the row. Without `reasoning`,
    what stands in an answer before </think> is dropped first; token `ids` that the target wrote stay whole.
    """
    if "input_ids" in row:
        return _given(row)
    if "text" in row:
        ids = cast(list[int], tokenizer(row["text"]).input_ids)
        return Example(ids, [True] * len(ids))
    messages = [message if reasoning else without_reasoning(message) for message in row["messages"]]
    talk = Transcript(str(row.get("id", "a conversation")), messages, row.get("tools"), tokenizer, ends)
    talk.check()
    written = any(message.get("ids") for message in talk.spoken)
    made = talk.by_markers() if "generation" in marks_of(tokenizer) and not written else talk.by_prefixes()
    if not any(made.loss_mask):
        raise ValueError(
            f"{talk.name} has no assistant turn; a drafter learns from what the target says. With data.answer=true the target answers first"
        )
    return made


def _given(row: Row) -> Example:
    if len(row["input_ids"]) != len(row.get("loss_mask", ())):
        raise ValueError(
            f"{row.get('id', 'a row')} has {len(row['input_ids'])} input_ids, and loss_mask has another length; give one flag a token"
        )
    return Example(list(row["input_ids"]), [bool(flag) for flag in row["loss_mask"]])


def without_reasoning(message: Message) -> Message:
    """`message`, where an assistant says only what stands after its reasoning."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        return message
    kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    return {**kept, "content": message["content"].rpartition("</think>")[2].lstrip("\n")}


def marks_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The block tags of the chat template, such as generation, which stands around what an assistant says."""
    blocks = str(tokenizer.chat_template or "").split("{%")[1:]
    return {words[0] for block in blocks if (words := block.lstrip("-+ ").split("%}")[0].split())}


@dataclass(frozen=True)
class Transcript:
    """A conversation as a chat template renders it, in which the assistant's words are to be found."""

    name: str
    messages: Sequence[Message]
    tools: list[Any] | None
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]

    @property
    def spoken(self) -> list[Message]:
        """What the assistant says."""
        return [message for message in self.messages if message.get("role") == "assistant"]

    def check(self) -> None:
        """Raise ValueError where the assistant says nothing, or no text."""
        if any(not (turn.get("content") or turn.get("tool_calls") or turn.get("ids")) for turn in self.spoken):
            raise ValueError(
                f"{self.name} has an empty assistant turn; drop it, or let the target answer with scripts/regenerate.py"
            )
        if any(not isinstance(turn.get("content") or "", str) for turn in self.spoken):
            raise ValueError(f"{self.name} has an assistant turn whose content is no text; drop it")

    def by_markers(self) -> Example:
        """The template says itself where the assistant speaks."""
        told = _apply(self.tokenizer, self.messages, self.tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(told["input_ids"]), [bool(flag) for flag in told["assistant_masks"]]
        for at in range(1, len(ids)):
            mask[at] |= mask[at - 1] and ids[at] in self.ends and ids[at - 1] not in self.ends
        found = list(stretches(mask))
        if len(found) != len(self.spoken):
            raise ValueError(
                f"{self.name}: the chat template's generation markers mark {len(found)} answers where the assistant gives {len(self.spoken)}; mend the template"
            )
        for (start, end), message in zip(found, self.spoken, strict=True):
            unsaid = self._before_said(ids[start:end], message)
            mask[start : start + unsaid] = [False] * unsaid
        return Example(ids, mask)

    def by_prefixes(self) -> Example:
        """An answer is what the rendered text has beyond its prompt.

        It stops before a turn whose prompt does not begin with the text so far: a template that drops reasoning from
        history, or `ids` that are spelled otherwise when their text is tokenised again. The target never read both in a
        row.
        """
        ids: list[int] = []
        mask: list[bool] = []
        for turn, message in enumerate(self.messages):
            if message.get("role") != "assistant":
                continue
            before = render(self.tokenizer, self.messages[:turn], True, self.tools)
            if before[: len(ids)] != ids:
                break
            spoken, unsaid = message.get("ids"), 0
            if not spoken:
                spoken = self._after(before, render(self.tokenizer, self.messages[: turn + 1], False, self.tools))
                unsaid = self._before_said(spoken, message)
            mask += [False] * (len(before) - len(ids) + unsaid) + [True] * (len(spoken) - unsaid)
            ids = [*before, *spoken]
        return Example(ids, mask)

    def _after(self, before: list[int], whole: list[int]) -> list[int]:
        """What `whole` has beyond `before`, up to its last end token."""
        if whole[: len(before)] != before:
            raise ValueError(
                f"{self.name}: the chat template rewrites earlier text when the assistant answers, so the answer cannot be told from the prompt"
            )
        spoken = whole[len(before) :]
        last = max((at for at, token in enumerate(spoken) if token in self.ends), default=len(spoken) - 1)
        return spoken[: last + 1]

    def _before_said(self, spoken: list[int], message: Message) -> int:
        """How many tokens of a turn `spoken` the template put before what the assistant says, such as an empty <think></think>.

        Raises ValueError where the turn does not read as `message`, spaces around it and dropped reasoning aside.
        """
        if message.get("tool_calls"):
            return 0  # every template writes them its own way
        told = [token for token in spoken if token not in self.ends]
        content, text = message["content"].strip(), _text(self.tokenizer, told).strip()
        if text == content:
            return 0
        thought = str(message.get("reasoning_content") or message.get("reasoning") or "").strip()
        if thought and thought in text and text.endswith(content):
            return 0
        answer = content.rpartition("</think>")[2].strip()
        for unsaid in reversed(range(len(told) if text.endswith(answer) else 0)):
            if _text(self.tokenizer, told[unsaid:]).strip() == answer:
                return unsaid
        raise ValueError(
            f"{self.name}: the mask would mark {text[:60]!r} where the assistant says {content[:60]!r}; the chat template or the tokenizer changes it, so give such rows as input_ids and loss_mask"
        )


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return cast(str, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def stretches(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Start and end of every run of true."""
    start = None
    for at, marked in enumerate([*mask, False]):
        if marked and start is None:
            start = at
        elif not marked and start is not None:
            yield start, at
            start = None
