"""From messages to a prompt: templates, tokenizers, control tokens as text. May import prefix and
below."""
