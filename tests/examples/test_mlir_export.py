"""The example that writes a block as MLIR."""

from dataclasses import replace

import mlir_export
import pytest


@pytest.fixture(scope="module")
def exported() -> mlir_export.Exported:
    return mlir_export.export()


def test_its_claims_hold(exported: mlir_export.Exported) -> None:
    assert list(mlir_export.check(exported)) == []
    assert exported.report.ops == {"npu::npu_add_rms_norm": 1, "npu::npu_swiglu": 1}


def test_an_op_that_is_lost_is_found(exported: mlir_export.Exported) -> None:
    lines = exported.texts["torch"].splitlines()
    lost = [line for line in lines if "npu_swiglu" not in line and "overwrite" not in line]
    texts = {**exported.texts, "torch": "\n".join(lost)}
    failures = list(mlir_export.check(replace(exported, texts=texts)))
    assert [failure[:14] for failure in failures] == ["torch has {'np", "torch does not"]


def test_numbers_that_are_off_are_found(exported: mlir_export.Exported) -> None:
    (failure,) = mlir_export.check(replace(exported, off_by=(0.0, 0.1)))
    assert "the JIT's cache is off by 1.0e-01" in failure
