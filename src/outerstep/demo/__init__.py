"""The demo's ingredients: a small GPT, a corpus that every machine has, and the training loop its rows share."""
