"""`chipmesh plan --device-groups`: what fits on chips that are here, and on chips described in a file."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.app import main
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.runner import LoadOptions
from scheduler_svc.config import DEFAULT_CHUNK_TOKENS as SCHEDULERS_CHUNK
from tests.unit.models.tiny_llama import write_model
from worker_svc.model_runner import OperatorModelRunner
from worker_svc.plan_budget import DEFAULT_CHUNK_TOKENS

QWEN = str(Path(__file__).parents[2] / "data" / "qwen2.5-32b")
CHIPS = """
chips:
  a: {memory_total_bytes: 40 GB}
  b: {memory_total_bytes: 32 GB}
  slow: {memory_total_bytes: 40 GB, links: [{peer_device: 0, bandwidth_bytes_per_second: 1 GB},
                                            {peer_device: 1, bandwidth_bytes_per_second: 1 GB}]}
  c: {memory_total_bytes: 80 GiB, compute_dtypes: [float16], kv_cache_dtypes: [float16, int8],
      page_sizes_tokens: [64, 128], preferred_chunk_tokens: 8192, preferred_batch_size: 128,
      graph_capture: true}
"""


@pytest.fixture
def chips(tmp_path: Path) -> str:
    file = tmp_path / "chips.yaml"
    file.write_text(CHIPS, encoding="utf-8")
    return str(file)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def replicas(
    capsys: pytest.CaptureFixture[str], chips: str, groups: str, *words: str
) -> list[dict[str, Any]]:
    """All replicas of a plan of Qwen2.5-32B that fits."""
    code, document = plan(capsys, "--model", QWEN, "--chips", chips, "--device-groups", groups, *words)
    assert code == 0, document
    return [replica for group in document["groups"] for replica in group["replicas"]]


def test_one_chip_of_40_gb_is_refused_and_groups_beside_it_are_planned(
    chips: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", QWEN, "--chips", chips, "--device-groups", "a:0;a:1+a:2"]
    code, document = plan(capsys, *words)
    assert code == 1
    alone, pair = (group["replicas"][0] for group in document["groups"])
    assert alone["refusal"]["reason"] == "MODEL_DOES_NOT_FIT"
    assert "65.53 GB of weights" in alone["refusal"]["message"]
    assert pair["tokens"] == 9424
    assert main(["plan", *words]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "refused: the model does not fit" in text
    assert "9424 tokens fit" in text
    assert "modelled" in text


def test_each_rank_says_its_layers_heads_and_bytes(chips: str, capsys: pytest.CaptureFixture[str]) -> None:
    (replica,) = replicas(capsys, chips, "a:0+a:1")
    assert replica["modelled"] is True
    assert replica["layout"] == {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "reason": "tensor parallel inside a machine",
    }  # fmt: skip
    first, second = replica["ranks"]
    assert (first["device"], first["layers"], first["heads"], first["kv_heads"]) == (
        "a:0", [0, 64], [0, 20], [0, 4],
    )  # fmt: skip
    assert (second["device"], second["heads"], second["kv_heads"]) == ("a:1", [20, 40], [4, 8])
    # Worked out by hand in test_memory_budget.
    assert first["weight_bytes"] == 32_764_536_832
    assert first["kv_bytes_per_token"] == 131072
    assert first["graph_bytes"] == 0
    assert first["reserve_bytes"] == 40 * 10**9 - 32_764_536_832 - 9424 * 131072
    assert replica["chunk_tokens"] == DEFAULT_CHUNK_TOKENS


def test_four_chips_of_32_gb_and_mixed_groups_have_layouts_of_their_own(
    chips: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, other_pair, four, large = replicas(capsys, chips, "a:0+a:1,a:2+a:3;b:0+b:1+b:2+b:3;c:0")
    assert pair["tokens"] == other_pair["tokens"] == 9424
    assert (four["tokens"], four["full_context_requests"]) == (165_040, 5)
    assert four["ranks"][0]["weight_bytes"] == 16_382_928_896
    # 80 GiB, not GB: 0.85 of 85.9 x 10^9 less 65.5 x 10^9 of weights, in pages of 64 tokens.
    assert large["page_size"] == 64
    assert large["page_count"] == (85_899_345_920 * 85 // 100 - 65_527_752_704) // (64 * 262144)
    assert (large["dtype"], large["chunk_tokens"], large["max_running_requests"]) == ("float16", 8192, 128)


def test_machines_are_crossed_by_stages(chips: str, capsys: pytest.CaptureFixture[str]) -> None:
    (replica,) = replicas(capsys, chips, "b:0+b:1+b:2+b:3", "--host-devices", "2")
    assert replica["layout"]["tensor_parallel_size"] == 2
    assert replica["layout"]["pipeline_parallel_size"] == 2
    assert [rank["layers"] for rank in replica["ranks"]] == [[0, 32], [0, 32], [32, 64], [32, 64]]


def test_slow_links_are_seen_by_the_reports_own_field(chips: str, capsys: pytest.CaptureFixture[str]) -> None:
    (replica,) = replicas(capsys, chips, "slow:0+slow:1")
    assert replica["layout"]["pipeline_parallel_size"] == 2
    assert "1 GB/s" in replica["layout"]["reason"]


def test_sizes_fraction_and_quantization_are_as_asked(chips: str, capsys: pytest.CaptureFixture[str]) -> None:
    stages, *_ = replicas(capsys, chips, "b:0+b:1+b:2+b:3", "--pp-size", "4", "--mem-fraction-static", "0.7")
    assert stages["layout"]["reason"] == "as asked"
    # The last stage has a norm more than the first.
    least = min((int(32 * 10**9 * 0.7) - rank["weight_bytes"]) // (16 * 65536) for rank in stages["ranks"])
    assert stages["page_count"] == least
    (four_bits,) = replicas(capsys, chips, "b:0", "--quantization", "w4a16", "--max-total-tokens", "1024")
    assert four_bits["tokens"] == 1024
    assert four_bits["weights"] == "bfloat16, w4a16"


def test_kv_in_fewer_bits_makes_room_for_more_tokens(chips: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, narrow = (replicas(capsys, chips, "c:0", "--kv-cache-dtype", kind)[0] for kind in ("auto", "int8"))
    assert narrow["ranks"][0]["kv_bytes_per_token"] * 2 == plain["ranks"][0]["kv_bytes_per_token"]
    assert narrow["page_count"] // 2 == plain["page_count"]


def test_modelled_chips_are_planned_without_the_tensor_framework(chips: str) -> None:
    """It takes seconds to import, and nothing of it is needed."""
    code = (
        "import sys; sys.modules['torch'] = None; from meshkit.cli.app import main; "
        f"sys.exit(main(['plan', '--model', {QWEN!r}, '--chips', {chips!r}, '--device-groups', 'a:0+a:1']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("options", [{}, {"kernel": "off"}])
def test_a_chip_that_is_here_is_asked_and_the_load_takes_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str]
) -> None:
    """By a step program where there is one, else by operators."""
    model = str(write_model(tmp_path / "model", hidden_size=64, intermediate_size=96, num_attention_heads=2))
    words = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    code, document = plan(capsys, "--model", model, "--device-groups", "cpu:0", *words)
    assert code == 0
    (replica,) = document["groups"][0]["replicas"]
    assert replica["modelled"] is False
    backend = CpuBackend(CpuOptions(threads=1, kernel=options.get("kernel", "auto")))
    loaded = OperatorModelRunner(backend).load(
        LoadOptions(model, load_format="dummy"), lambda stage, share: None
    )
    assert replica["ranks"][0]["weight_bytes"] == loaded.weight_bytes
    assert replica["ranks"][0]["kv_bytes_per_token"] == loaded.kv_bytes_per_token
    assert document["operators_of"]["cpu"]["operators"]


def test_ranks_of_a_host_share_its_memory_and_run_without_a_step_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "model", hidden_size=64, num_attention_heads=2))
    if len(CpuBackend(CpuOptions()).devices.list_devices()) < 2:
        pytest.skip("a host with one processor has one device")
    code, document = plan(capsys, "--model", model, "--device-groups", "cpu:0+cpu:1")
    assert code == 0
    (replica,) = document["groups"][0]["replicas"]
    total = CpuBackend(CpuOptions()).devices.properties(0).memory_total_bytes
    assert replica["ranks"][0]["memory_bytes"] == total // 2
    program = document["operators_of"]["cpu"]["step_program"]
    assert program["value"] is None
    assert "one of 2 ranks" in program["reason"]


def test_operators_of_another_back_end_may_be_shown_beside_modelled_chips(
    chips: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "model", hidden_size=64, num_attention_heads=2))
    words = ["--model", model, "--chips", chips, "--device-groups", "a:0", "--backend", "cpu"]
    code, document = plan(capsys, *words)
    assert code == 0
    assert set(document["operators_of"]) == {"cpu"}
    assert document["groups"][0]["replicas"][0]["tokens"] > 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--device-groups", "a:0"), 2, "--backend"),
        ((), 2, "--device-groups"),
        (("--device-groups", "a:0+"), 2, "--device-groups"),
        (("--chips", "CHIPS", "--backend", "cpu"), 2, "--chips"),
        (("--chips", "CHIPS", "--device-groups", "d:0"), 2, "d:0 is not in the file"),
        (("--chips", "CHIPS", "--device-groups", "a:0", "--mem-fraction-static", "1.5"), 2, "(0, 1]"),
        (("--chips", "CHIPS", "--device-groups", "a:0+a:1", "--dtype", "float32"), 1, "float32"),
        (("--chips", "CHIPS", "--device-groups", "a:0+a:1", "--tp-size", "3"), 1, "has 2 chips"),
        (
            ("--chips", "CHIPS", "--device-groups", "a:0+a:1+a:2", "--tp-size", "3"),
            1,
            "num_attention_heads 40",
        ),
        (("--device-groups", "hash:0"), 1, "runner of its own"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_cause(
    chips: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    got = main(["plan", "--model", QWEN, *(chips if word == "CHIPS" else word for word in words)])
    captured = capsys.readouterr()
    assert got == code, captured
    assert said in " ".join((captured.out + captured.err).split())
    assert "Traceback" not in captured.err
    assert "----" not in captured.err  # A flag is named once.


def test_the_default_chunk_is_the_schedulers() -> None:
    assert DEFAULT_CHUNK_TOKENS == SCHEDULERS_CHUNK


@pytest.mark.parametrize(("columns", "heads"), [("140", "rank chip memory"), ("80", "rank 0 1 2 3")])
def test_a_narrow_terminal_gets_a_column_for_each_rank_and_nothing_is_cut(
    chips: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, heads: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert (
        main(
            [
                "plan",
                "--model",
                QWEN,
                "--chips",
                chips,
                "--device-groups",
                "+".join(f"a:{n}" for n in range(8)),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert heads in " ".join(text.replace("┃", " ").split())
    assert text.count("8.19 GB") == 8
    assert text.count("32768 B") == 8
    assert "…" not in text


def test_the_documented_output_is_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "models.md").read_text(encoding="utf-8").split("## What fits")[1]
    (tmp_path / "chips.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    command, shown = page.split("```\n$ chipmesh ")[1].split("```")[0].split("\n", 1)
    words = [str(tmp_path / word) if word == "chips.yaml" else word for word in shlex.split(command)]
    monkeypatch.chdir(root)
    monkeypatch.setenv("COLUMNS", "130")
    assert main(words) == 1
    assert capsys.readouterr().out.rstrip().split("\n") == shown.rstrip().split("\n")
