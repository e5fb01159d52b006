"""Pods of a rendered chart as processes of this host: with their own configuration, certificates and keys.

What Kubernetes would give (mounts, names, addresses) is given here, and nothing else is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshkit.certificates.folder import CertificateFolder
from meshkit.rpc.policy import Peer, Role
from tests.deploy.chart import Manifest, Rendered, written_configuration

START_LIMIT_S = 60.0


class Pods:
    """Runs services of `rendered`, each as Kubernetes would run its pod.

    secrets: texts by the Secret's name and field; certificates are made for all Secrets `chipmesh-tls-*`.
    """

    def __init__(self, rendered: Rendered, folder: Path, *, secrets: dict[str, dict[str, str]]) -> None:
        self._rendered = rendered
        self._folder = folder
        self._secrets = secrets
        self._authority = CertificateFolder(folder / "certificates")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, owner: str, pod_name: str, **here: Any) -> None:
        """Start the service of the pod that `owner` makes.

        here: fields of its configuration that name this host's addresses in place of the pod's.
        """
        pod = self._rendered.pods()[owner]
        folder = self._folder / f"{pod_name}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        written = written_configuration(self._rendered, pod, folder, pod_name=pod_name)
        self._move_mounts(pod, written, folder)
        ready = self._ready_file(pod_name)
        ready.unlink(missing_ok=True)
        overlay = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0", "ready_file": str(ready), **here}
        (written / "90-here.json").write_text(json.dumps(overlay), encoding="utf-8")
        service, *_ = pod["spec"]["containers"][0]["args"]
        with self._log(pod_name).open("ab") as log:
            self._running[pod_name] = subprocess.Popen(
                [sys.executable, "-m", "meshkit.cli", service, "--config", str(written)],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_ready(self, pod_name: str) -> dict[str, Any]:
        """What the service says of itself once it is ready."""
        file = self._ready_file(pod_name)
        self._wait(pod_name, file.exists)
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content

    def wait_http(self, pod_name: str) -> str:
        """Where the service's probes are answered, also before it is ready; it is in its log."""
        found: list[str] = []

        def look() -> bool:
            for line in self._log(pod_name).read_text(encoding="utf-8").splitlines():
                if "http server listens" in line and (entry := json.loads(line))["field"] == "http_listen":
                    found.append(entry["address"])
            return bool(found)

        self._wait(pod_name, look)
        return found[-1]

    def stop(self, pod_name: str) -> None:
        """As a kubelet does: SIGTERM, and SIGKILL after the pod's grace period."""
        process = self._running.pop(pod_name)
        process.terminate()
        owner = pod_name.rpartition("-")[0]
        try:
            process.wait(self._rendered.pods()[owner]["spec"]["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop_all(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _move_mounts(self, pod: Manifest, written: Path, folder: Path) -> None:
        """Fill the pod's further mounts, and make its configuration name where they are here."""
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        moved: dict[str, str] = {}
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            target = folder / "mounts" / mount["name"]
            if self._fill(volumes[mount["name"]], target):
                moved[mount["mountPath"]] = str(target)
        for file in (*written.glob("*.json"), *(folder / "mounts").glob("*/*.json")):
            text = file.read_text(encoding="utf-8")
            for path, target_path in moved.items():
                text = text.replace(f"{path}/", f"{target_path}/")
            file.write_text(text, encoding="utf-8")

    def _fill(self, volume: Manifest, target: Path) -> bool:
        """Whether it is a volume that brings files, which then lie in `target`."""
        if volume["name"] == "configuration" or not {"configMap", "secret", "projected"} & volume.keys():
            return False
        target.mkdir(parents=True)
        if "configMap" in volume:
            files = self._rendered.one("ConfigMap", volume["configMap"]["name"])["data"]
            for name, text in files.items():
                (target / name).write_text(text, encoding="utf-8")
        elif "secret" in volume:
            for name, text in self._secrets[volume["secret"]["secretName"]].items():
                (target / name).write_text(text, encoding="utf-8")
        else:
            for source in volume["projected"]["sources"]:
                self._project(source["secret"], target)
        return True

    def _project(self, secret: Manifest, target: Path) -> None:
        folder_name = secret["name"].removeprefix("chipmesh-tls-")
        role, _, name = folder_name.partition("-")
        self._authority.create([Peer(Role(role), name)], lifetime=timedelta(days=1))
        for item in secret["items"]:
            (target / item["path"]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._folder / "certificates" / folder_name / item["key"], target / item["path"])

    def _wait(self, pod_name: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_there():
            assert self._running[pod_name].poll() is None, self._log(pod_name).read_text(encoding="utf-8")
            assert time.monotonic() < deadline, f"{pod_name} was not there in {START_LIMIT_S} s"
            time.sleep(0.01)

    def _log(self, pod_name: str) -> Path:
        return self._folder / f"{pod_name}.log"

    def _ready_file(self, pod_name: str) -> Path:
        return self._folder / f"{pod_name}.ready"


def probe(address: str, path: str) -> int:
    """The status that a kubelet's probe would get."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
