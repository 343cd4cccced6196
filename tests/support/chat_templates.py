"""Chat templates of the kinds that checkpoints have, short, for tests of what is text in them."""

from __future__ import annotations

_END = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
_TEXT = (
    "{%- macro text_of(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content or [] -%}{%- if part.type == 'image' -%}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)

# Everything a caller can give is written somewhere, and some of it between signs of the template.
TOOLS = (
    _TEXT + "{%- if tools -%}<|im_start|>system\n{{ persona }}{%- for tool in tools -%}"
    "{{ tool | tojson }}\n{%- set function = tool.function -%}<function><name>{{ function.name }}"
    "</name>{%- for name, value in function.parameters.properties.items() -%}"
    "{{- '\n<' ~ name ~ '>' ~ value.description ~ '</' ~ name ~ '>' -}}"
    "{%- for key in value if key not in ['type', 'description'] -%}"
    "{{- '<' ~ key ~ '>' ~ value[key] | string -}}{%- endfor -%}{%- endfor -%}</function>"
    "{%- endfor -%}<|im_end|>\n{%- endif -%}"
    "{%- for paper in documents or [] -%}[{{ paper.title }}]({{ paper.text }}){%- endfor -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.name -%}{{ '<|' ~ message.name ~ '|>' }}{%- endif -%}"
    "{%- if message.reasoning_content -%}<think>\n{{ message.reasoning_content }}\n</think>\n"
    "{%- endif -%}{{- text_of(message.content) | trim -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>' ~ call.function.name ~ '>' -}}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{- '<' ~ name ~ '>' ~ value ~ '<' -}}{%- endfor -%}</tool_call>{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}" + _END
)

# A token is made of who speaks.
ROLES = (
    "{{- bos_token -}}{%- for message in messages -%}{{- '<|' + message['role'] + '|>\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)

# Thoughts of earlier answers are cut out, and what a tool said is known by its tags.
THOUGHTS = (
    _TEXT + "{%- set seen = namespace(last=0) -%}{%- for message in messages -%}"
    "{%- set words = text_of(message.content) -%}{%- if message.role == 'user' and not "
    "(words.startswith('<tool_response>') and words.endswith('</tool_response>')) -%}"
    "{%- set seen.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- set content = text_of(message.content) -%}{%- if message.role == 'assistant' -%}"
    "{%- set thought = message.reasoning_content or '' -%}{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{%- if loop.index0 > seen.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}"
    "{%- endif -%}{%- endif -%}{{- content -}}{{- '<|im_end|>\n' -}}{%- endfor -%}" + _END
)

# It looks for tokens which it wrote itself a moment ago.
COMPOSED = (
    _TEXT + "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- set content = text_of(message.content) -%}{%- if message.role == 'assistant' -%}"
    "{%- set content = '<think>' ~ (message.reasoning_content or '') ~ '</think>' ~ content -%}"
    "{%- if not loop.last and '</think>' in content -%}"
    "{%- set content = '<think></think>' ~ content.split('</think>')[-1] -%}{%- endif -%}"
    "{%- endif -%}{{- content -}}{{- '<|im_end|>\n' -}}{%- endfor -%}" + _END
)
