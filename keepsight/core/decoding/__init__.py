"""From a prefilled prompt to an answer: lanes, batches, guessed tokens, sampling, text."""
