"""S4: of a model folder with a pickle, remote code and a hostile template, nothing is ever run.

Every process of a real mesh is audited from its first instruction on, see tests/support/audit.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2
from tests.e2e.test_weights_reload import write_weights
from tests.support.mesh import RunningMesh, run_cli, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MARK = "PLANTED_BY_THE_TEST"
AUDIT = Path(__file__).resolve().parents[1] / "support" / "audit"
REPOSITORY = Path(__file__).resolve().parents[2]

ATTACKS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('FOLDER') }}",
    "{{ lipsum.__globals__['os'].mkdir('FOLDER') }}",
    "{{ raise_exception.__globals__['__builtins__']['exec']('import os; os.mkdir(\"FOLDER\")') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__base__.__subclasses__() }}",
    "{% include 'modeling.py' %}",
    "{% import 'modeling.py' as modeling %}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
)
"""What a template might try to get out of its sandbox with; FOLDER is what the others would make."""


class MakesFolder:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


class Audit:
    """What all processes that inherit its environment have done."""

    def __init__(self, folder: Path, *, model: Path) -> None:
        self.folder = folder
        folder.mkdir()
        roots = [*{sys.prefix, sys.base_prefix, str(Path(os.__file__).parent)}, str(REPOSITORY)]
        self.environment = {
            "AUDIT_DIR": str(folder),
            "AUDIT_MARK": MARK,
            "AUDIT_MODEL": str(model),
            "AUDIT_ROOTS": os.pathsep.join(roots),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(AUDIT), os.environ.get("PYTHONPATH")])),
        }

    def events(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                yield json.loads(line)

    def commands(self) -> list[str]:
        return [" ".join(event["argv"]) for event in self.events() if event["event"] == "begins"]

    def seen(self) -> list[dict[str, Any]]:
        """All but the beginnings, and Jinja's own compilation of the model's template.

        A template is compiled to Python by the sandbox, and has to be; what of it runs is the sandbox's to
        say, and the other events would show what got out.
        """
        return [event for event in self.events() if event["event"] != "begins" and not _is_jinjas(event)]


def _is_jinjas(event: dict[str, Any]) -> bool:
    return (
        event["event"] in ("compile", "exec")
        and event["filename"] in ("<template>", "<unknown>")
        and event["caller"].endswith(os.path.join("jinja2", "environment.py"))
    )


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The folder that whatever is run of the model would make."""
    return tmp_path / MARK


@pytest.fixture
def model(tmp_path: Path, planted: Path) -> Path:
    return write_hostile_model(tmp_path / "model", planted)


@pytest.fixture
def audit(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    audit = Audit(tmp_path / "audit", model=model)
    for name, value in audit.environment.items():
        monkeypatch.setenv(name, value)
    return audit


def write_hostile_model(folder: Path, planted: Path) -> Path:
    """A small real model, with all that a folder may hold of somebody else's code beside it."""
    write_weights(folder, seed=3)
    code = f"import os\n{MARK} = os.mkdir({str(planted)!r})\n"
    for name in ("modeling", "tokenization", "sitecustomize", "conftest", "__init__", "setup"):
        (folder / f"{name}.py").write_text(code)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps({"weight": MakesFolder(planted)}))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    config["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {
        "chat_template": _hostile_template(planted),
        "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]},
        "tokenizer_class": "Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _hostile_template(planted: Path) -> str:
    """Message N starts attack N; every other one is rendered."""
    attacks = "".join(
        f"{{% if messages[0]['content'] == '{number}' %}}{attack}{{% endif %}}"
        for number, attack in enumerate(ATTACKS)
    )
    return f"{attacks}{MARK}: {{{{ messages[0]['content'] }}}}".replace("FOLDER", str(planted))


def ask(mesh: RunningMesh, content: str) -> str | grpc.StatusCode:
    """The prompt that the template makes of a message, or how it is refused."""
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(
            chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=content)])
        ),
        stop=inference_pb2.StopOptions(max_tokens=2),
    )
    try:
        accepted = mesh.client.generate(request).accepted
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return bytes(accepted.prompt_token_ids).hex()


def test_a_mesh_on_a_hostile_model_folder_runs_nothing_of_it(
    tmp_path: Path, audit: Audit, model: Path, planted: Path
) -> None:
    with running_mesh(tmp_path / "state", "--model-path", str(model), "--dtype", "float32") as mesh:
        assert isinstance(ask(mesh, "hello"), str), "the template was never rendered"
        for number in range(len(ATTACKS)):
            assert ask(mesh, str(number)) is grpc.StatusCode.INVALID_ARGUMENT, ATTACKS[number]
        assert isinstance(ask(mesh, "hello again"), str)
    commands = audit.commands()
    for service in ("gateway", "scheduler", "worker"):
        assert any(f"meshkit.cli {service} --config" in command for command in commands), commands
    assert any("worker_svc.executor" in command for command in commands), commands
    assert audit.seen() == []
    assert not planted.exists()
    assert any(_is_jinjas(event) for event in audit.events()), "the audit does not see what it should"


def test_a_folder_with_nothing_but_a_pickle_is_refused_and_never_opened(
    tmp_path: Path, audit: Audit, model: Path, planted: Path
) -> None:
    (model / "model.safetensors").unlink()
    refused = run_cli("up", "--detach", "--model-path", str(model), state_dir=tmp_path / "state")
    assert refused.returncode != 0
    assert "safetensors" in refused.stdout + refused.stderr
    assert audit.commands()
    assert audit.seen() == []
    assert not planted.exists()


CRIMES = {
    "pickle.find_class": "import pickle; pickle.load(open(model + '/pytorch_model.bin', 'rb'))",
    "exec": "sys.path.insert(0, model); import tokenization",
    "compile": "compile(open(model + '/tokenization.py').read(), model + '/tokenization.py', 'exec')",
    "open": "open(model + '/optimizer.pt', 'rb').close()",
    "os.mkdir": "import jinja2, json; jinja2.Template("
    "'{{ lipsum.__globals__.os.mkdir(planted) }}').render(planted=planted)",
}
"""Programs that do to the model what no service may, by the event that has to show it."""


@pytest.mark.parametrize("event", CRIMES)
def test_the_audit_sees_what_must_not_happen(audit: Audit, model: Path, planted: Path, event: str) -> None:
    program = f"import sys; model, planted = sys.argv[1:]; {CRIMES[event]}"
    command = [sys.executable, "-c", program, str(model), str(planted)]
    subprocess.run(command, check=True, timeout=60)
    assert event in {each["event"] for each in audit.seen()}
