"""Code of a user's own, as the docs show it: models and trainers that know nothing of orc."""
