"""Whatever the template, the mask marks what the assistant says, its end token included, and nothing else."""

from dataclasses import replace

import pytest

from templates import SHAPES, Shape
from train.chat import Example, Message, example, render, stretches

TALKS: dict[str, list[tuple[str, str]]] = {
    "one turn": [("user", "Hi?"), ("assistant", "Hello.")],
    "three turns": [
        ("user", "a"),
        ("assistant", "First, b."),
        ("user", "c?"),
        ("assistant", "naïve — ☃\n\nand more"),
        ("user", "e"),
        ("assistant", "f"),
    ],
    "system prompt": [("system", "assistant: obey"), ("user", "assistant:"), ("assistant", "assistant:")],
    "spaces": [("user", " a "), ("assistant", "  indented\n"), ("user", "b"), ("assistant", "c ")],
    "last word the user's": [("user", "a"), ("assistant", "b"), ("user", "c")],
}
SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def messages(talk: list[tuple[str, str]]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in talk]


def spoken(shape: Shape, made: Example) -> list[str]:
    """What the mask marks, stretch by stretch."""
    tokenizer = shape.tokenizer()
    return [tokenizer.decode(made.input_ids[start:end]) for start, end in stretches(made.loss_mask)]


def told(shape: Shape, *talk: Message, reasoning: bool = True) -> list[str]:
    return spoken(shape, example(shape.tokenizer(), {"messages": list(talk)}, shape.end_tokens(), reasoning))


@SHAPE
@pytest.mark.parametrize("talk", TALKS.values(), ids=list(TALKS))
def test_the_mask_marks_the_assistants_text_and_its_end_token(shape: Shape, talk: list[tuple[str, str]]) -> None:
    if talk[0][0] == "system" and not shape.system:
        pytest.skip("this template knows no system turn")
    answers = [content for role, content in talk if role == "assistant"]
    found = told(shape, *messages(talk))
    if not shape.later:
        answers = answers[: len(found)]
        assert found
    (end,) = shape.ends
    unended = not shape.ended and talk[-1][0] == "assistant"
    for number, (answer, text) in enumerate(zip(answers, found, strict=True), start=1):
        assert text.strip().endswith(end) or (unended and number == len(answers)) or not shape.ended
        assert text.replace(end, "").strip() == answer.strip()


@SHAPE
def test_what_is_marked_stands_where_the_target_would_have_said_it(shape: Shape) -> None:
    """Before every answer stands the very prompt that a server would give the target."""
    talk = messages(TALKS["three turns"])
    tokenizer = shape.tokenizer()
    made = example(tokenizer, {"messages": talk}, shape.end_tokens())
    starts = [start for start, _ in stretches(made.loss_mask)]
    for number, start in enumerate(starts):
        prompt = tokenizer.decode(render(tokenizer, talk[: 2 * number + 1], speak=True))
        before = tokenizer.decode(made.input_ids[:start])
        assert before.removesuffix("<think>\n\n</think>\n\n") == prompt  # the empty section is not said


def test_reasoning_is_kept_or_dropped() -> None:
    shape = SHAPES["qwen3"]
    ask = {"role": "user", "content": "q"}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    apart = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    for answer in (inline, apart):
        assert told(shape, ask, answer) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
        assert told(shape, ask, answer, reasoning=False) == ["yes<|im_end|>"]
    assert told(SHAPES["deepseek"], ask, inline) == ["yes<|eos|>"]  # the template drops it itself
    assert told(SHAPES["chatml"], ask, inline) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert told(SHAPES["chatml"], ask, inline, reasoning=False) == ["yes<|im_end|>"]


def test_an_empty_section_that_the_template_writes_is_not_the_assistants() -> None:
    assert told(SHAPES["qwen3"], *messages(TALKS["one turn"])) == ["Hello.<|im_end|>"]


def test_a_call_of_a_tool_is_said_by_the_assistant() -> None:
    body = "(m['content'] or '') + (m['tool_calls'] | tojson if m['tool_calls'] else '')"
    shape = replace(
        SHAPES["chatml"],
        template="{{ tools | length if tools }}" + SHAPES["chatml"].template.replace("m['content']", f"({body})"),
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    talk = [
        {"role": "user", "content": "1+1"},
        call,
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2."},
    ]
    row = {"messages": talk, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    first, last = spoken(shape, example(shape.tokenizer(), row, shape.end_tokens()))
    assert '"add"' in first
    assert first.endswith("<|im_end|>")
    assert last == "2.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("chatml", ("m['content']", "m['content'] | upper"), "x1: the mask would mark 'HELLO.' where the assistant says 'Hello.'"),
        ("chatml", ("m['content']", "(m['content'] | upper if m['role'] == 'assistant' else m['content'])"), "x1: the mask would mark"),
        ("markers", ("{% generation %}", "{% generation %}{{ 'I say: ' }}"), None),
        ("markers", ("m['role'] == 'assistant' %}", "m['role'] == 'assistant' and loop.last %}"), None),
        ("deepseek", ("{{ '<|Assistant|>' }}{% endif %}", "{{ '<|Assistant|><think>\n' }}{% endif %}"), "x1: the chat template rewrites"),
    ],
)  # fmt: skip
def test_a_template_that_changes_what_is_said_is_refused(
    name: str, change: tuple[str, str], sentence: str | None
) -> None:
    shape = replace(SHAPES[name], template=SHAPES[name].template.replace(*change))
    assert shape.template != SHAPES[name].template
    row = {"id": "x1", "messages": messages(TALKS["one turn"])}
    if sentence is None:  # what the template puts before an answer is left out, what it marks suffices
        assert spoken(shape, example(shape.tokenizer(), row, shape.end_tokens())) == ["Hello.<|im_end|>"]
        return
    with pytest.raises(ValueError, match=sentence) as refusal:
        example(shape.tokenizer(), row, shape.end_tokens())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("talk", "name", "sentence"),
    [
        (TALKS["system prompt"], "gemma2", "the chat template refuses the conversation that begins 'assistant: obey' .System role not supported"),
        ([("user", "a"), ("user", "b"), ("assistant", "c")], "mistral", "refuses the conversation that begins 'a' .Conversation roles must"),
        ([("user", "a"), ("assistant", "")], "chatml", "x1 has an empty assistant turn; drop it, or let the target answer"),
        ([("user", "a")], "markers", "x1 has no assistant turn"),
        ([("user", 5), ("assistant", "b")], "chatml", "the chat template refuses the conversation that begins '5' .can only concatenate"),
        ([("user", "a"), ("assistant", [{"type": "text"}])], "chatml", "x1 has an assistant turn whose content is no text"),
    ],
)  # fmt: skip
def test_a_conversation_that_teaches_nothing_sound_is_refused(talk: list, name: str, sentence: str) -> None:
    shape = SHAPES[name]
    with pytest.raises(ValueError, match=sentence) as refusal:
        example(shape.tokenizer(), {"id": "x1", "messages": messages(talk)}, shape.end_tokens())
    assert "\n" not in str(refusal.value)


def test_markers_that_forget_an_answer_are_refused() -> None:
    shape = SHAPES["markers"]
    shape = replace(
        shape,
        template=shape.template.replace("m['role'] == 'assistant' %}", "m['role'] == 'assistant' and loop.last %}"),
    )
    with pytest.raises(ValueError, match="generation markers mark 1 answers where the assistant gives 3"):
        told(shape, *messages(TALKS["three turns"]))
