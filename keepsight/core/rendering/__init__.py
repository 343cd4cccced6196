"""From messages to the ids of a prompt: templates, tokenizers, control tokens as text."""
