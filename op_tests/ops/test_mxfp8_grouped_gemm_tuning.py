"""Published rows beside ours, and the op inside torch.compile."""

from __future__ import annotations

import json
from pathlib import Path

from bench_moe_peers import compared, main
from click.testing import CliRunner


def test_published_rows_stand_beside_one_launch_each(tmp_path: Path) -> None:
    row = {"tokens": "2", "model_dim": "256", "inter_dim": "64", "experts": "5", "topk": "2"}
    ours = compared({**row, "us_gemm1": "10", "us_gemm2": "20"})
    assert 2 <= ours.distinct <= 4  # of two tokens with two choices each
    # A kernel's start and two trips to memory, and not two launches: sums and quantisation are in neither stage.
    assert 2.5 < ours.gemm1_us < 7 and 2.5 < ours.gemm2_us < 7
    assert ours.gemm1_ratio == ours.gemm1_us / 10 and ours.gemm2_ratio == ours.gemm2_us / 20
    assert ours.both_ratio == (ours.gemm1_us + ours.gemm2_us) / 30
    (tmp_path / "moe_mxfp8_peers_gfx950.csv").write_text(
        f"{','.join(row)},us_gemm1,us_gemm2\n{','.join(row.values())},10,20\n64,256,64,5,2,1,1\n"
    )
    done = CliRunner().invoke(main, ["--published", str(tmp_path), "--csv", str(tmp_path / "out.csv")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output.splitlines()[-1])
    assert told["rows"] == 1 and told["worst"] == ours.both_ratio  # 64 tokens are more than --max-tokens
    assert (tmp_path / "out.csv").read_text().startswith("tokens,width,inner,experts,top_k,distinct,gemm1_us")
