"""The flight desk example: a task, a tiny model and the recipe with which it learns the task while rollstream streams."""
