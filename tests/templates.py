"""Chat templates with the markers and quirks of those in use, written for the tests.

Each has the special tokens it needs; `ends` are those that end a turn.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from models.source import byte_tokenizer

LOOP = "{% for m in messages %}"
SPEAK = "{% if add_generation_prompt %}"


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens, and what it does to a conversation."""

    template: str
    specials: tuple[str, ...]
    ends: tuple[str, ...]
    system: bool = True  # knows system turns
    strips: bool = False  # takes the spaces around a text away
    ended: bool = True  # writes the end token after the last turn
    later: bool = True  # tells the second answer of a conversation too

    def tokenizer(self) -> PreTrainedTokenizerBase:
        made = byte_tokenizer()
        made.add_special_tokens({"additional_special_tokens": list(self.specials)})
        made.chat_template = self.template
        return made

    def end_tokens(self) -> frozenset[int]:
        return frozenset(self.tokenizer().convert_tokens_to_ids(list(self.ends)))


def headed(start: str, middle: str, end: str, content: str = "m['content']", extra: str = "") -> str:
    """Every turn is start role middle content end."""
    turn = f"{{{{ '{start}' + m['role'] + '{middle}' + {content} + '{end}' }}}}"
    return f"{extra}{LOOP}{turn}{{% endfor %}}{SPEAK}{{{{ '{start}assistant{middle}' }}}}{{% endif %}}"


DEFAULT = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
CHATML = ("<|im_start|>", "<|im_end|>")

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}{{ 'A chat.' }}{% endif %}"
    + LOOP
    + "{% if m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}{% elif m['role'] == 'assistant' %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}"
    "{% endif %}{% endfor %}" + SPEAK + "{{ ' ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}" + LOOP + "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
QWEN3 = (
    LOOP + "{% set content = m['content'] %}{% set thought = m.get('reasoning_content', '') %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + SPEAK
    + "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}" + SPEAK + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA2 = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA
PHI3 = (
    LOOP
    + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
    + SPEAK
    + "{{ '<|assistant|>\n' }}{% else %}{{ '<|end|>' }}{% endif %}"
)
DEEPSEEK = (
    LOOP
    + "{% if m['role'] == 'system' %}{{ m['content'] }}{% elif m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '<|eos|>' }}{% endif %}{% endfor %}"
    + SPEAK
    + "{{ '<|Assistant|>' }}{% endif %}"
)
UNENDED = (
    LOOP
    + "{{ m['role'] + ': ' + m['content'] }}{% if not loop.last %}{{ '<|stop|>' }}{% endif %}{% endfor %}"
    + SPEAK
    + "{{ '<|stop|>assistant: ' }}{% endif %}"
)
MARKED = (
    LOOP
    + "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    + SPEAK
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SHAPES = {
    "llama2": Shape(LLAMA2, ("<s>", "</s>"), ("</s>",), strips=True),
    "llama3": Shape(
        headed(
            "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "m['content'] | trim", "{{ '<|begin|>' }}"
        ),
        ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        strips=True,
    ),
    "vicuna": Shape(VICUNA, ("</s>",), ("</s>",)),
    "mistral": Shape(MISTRAL, ("<s>", "</s>"), ("</s>",), system=False),
    "qwen2": Shape(headed("<|im_start|>", "\n", "<|im_end|>\n", extra=DEFAULT), CHATML, ("<|im_end|>",)),
    "qwen3": Shape(QWEN3, (*CHATML, "<think>", "</think>"), ("<|im_end|>",), later=False),
    "gemma2": Shape(
        GEMMA2, ("<bos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), system=False, strips=True
    ),
    "gemma3": Shape(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), strips=True),
    "phi3": Shape(PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|stop|>"), ("<|stop|>",)),
    "phi4": Shape(headed("<|im_start|>", "<|im_sep|>", "<|im_end|>"), (*CHATML, "<|im_sep|>"), ("<|im_end|>",)),
    "chatml": Shape(headed("<|im_start|>", "\n", "<|im_end|>\n"), CHATML, ("<|im_end|>",)),
    "deepseek": Shape(DEEPSEEK, ("<|User|>", "<|Assistant|>", "<|eos|>"), ("<|eos|>",)),
    "no last end": Shape(UNENDED, ("<|stop|>",), ("<|stop|>",), ended=False),
    "markers": Shape(MARKED, CHATML, ("<|im_end|>",)),
}
