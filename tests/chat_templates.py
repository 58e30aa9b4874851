"""Chat templates in the manner of well-known models, written for the tests."""

from __future__ import annotations

_LOOP = "{% for m in messages %}"

# Qwen2.5's manner: a system prompt of its own where none is given
QWEN25 = (
    "{%- if tools %}{{- raise_exception('no tools here') }}{%- endif %}"
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are Q, made by A.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- if m.tool_calls %}{{- raise_exception('no calls here') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen3's manner: thoughts of earlier turns are dropped, an empty thought stands before the last answer
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')"
    " if '</think>' in m.content else '' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + answer.lstrip('\\n') }}"
    "{%- else %}{{- answer }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# Llama 3.1's manner: a date in the system turn, contents trimmed, optional tools asked for in many ways
LLAMA31 = (
    "{{- bos_token }}{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools is not none %}{{- 'Tools' }}{%- endif %}"
    "{{- 'Today Date: ' + date_string + '\\n\\n' }}{{- system }}{{- '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m or m.role == 'ipython' %}{{- raise_exception('no calls') }}{%- endif %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

# an early Llama 3's manner: it asks for the next answer even when told not to
ALWAYS_ASKS = (
    "{{ bos_token }}"
    + _LOOP
    + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

# Mistral's manner: the system turn goes into the last question, EOS ends an answer, no header
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{%- set ns = namespace(last=-1) %}"
    "{%- for m in turns %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{{- bos_token }}{%- for m in turns %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST]' }}"
    "{%- if loop.index0 == ns.last and system is defined %}{{- system + '\\n\\n' }}{%- endif %}"
    "{{- m.content + '[/INST]' }}{%- else %}{{- m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)

# Llama 2's manner: blanks around contents
LLAMA2 = (
    _LOOP + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Gemma's manner: other names of roles, the system turn before the first question
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}" + _LOOP + "<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# Phi 3's manner: EOS at the very end only
PHI3 = (
    _LOOP + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

# no control tokens at all
WORDS = (
    _LOOP + "{{ '### ' + ('Answer' if m.role == 'assistant' else 'Question') + ':\n' + m.content | trim + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Answer:\n' }}{% endif %}"
)

# name -> (template, what ends an answer)
ALL = {
    "chatml": (None, "<|im_end|>"),
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>"),
    "always_asks": (ALWAYS_ASKS, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "llama2": (LLAMA2, " </s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "phi3": (PHI3, "<|end|>"),
    "words": (WORDS, ""),
}
CONTROL = [
    *("<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
]
