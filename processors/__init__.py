"""Stages that turn calls into samples: pure cores (`join`, `group`, `score`, ...) and a thin Faust shell (`shell/`)."""
