"""MLflow: at MLFLOW_TRACKING_URI, else in the data base FOLDER/mlflow.db, which `mlflow ui --backend-store-uri
sqlite:///FOLDER/mlflow.db` shows. (Its folders of files, ./mlruns, are refused by MLflow 3.) A run that the script has
begun is not touched."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path


class MlflowWriter:
    def __init__(self, place: Path, run: str, who: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            place.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(place / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "outerstep")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        made = self._client.create_run(experiment, run_name=who, tags={"outerstep.run": run, "outerstep.who": who})
        self._run_id = made.info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, [self._metric(name, value, now_ms, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
