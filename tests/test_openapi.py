"""Every answer matches the OpenAPI description: schemathesis sends generated requests to a real port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from conftest import watched_retractions, web
from sglang_tuning_exporter.serve.guard import Lane
from sglang_tuning_exporter.serve.pages import make_pages

if TYPE_CHECKING:
    from pathlib import Path


def test_every_answer_is_one_that_the_description_has(tmp_path: Path) -> None:
    sidecar, asked = watched_retractions(tmp_path, sglang_url=None), set()
    description = make_pages(sidecar, Lane("pages", 1)).openapi()
    with web(sidecar) as address:
        for found in schemathesis.openapi.from_dict(description).get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()

            @settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def keeps_to_it(case: schemathesis.Case[Any]) -> None:
                asked.add(case.operation.path)
                case.call_and_validate(
                    base_url=address,
                    allow_redirects=False,
                    checks=[status_code_conformance, content_type_conformance,
                            response_schema_conformance],
                )  # fmt: skip

            keeps_to_it()
    assert asked == set(description["paths"])
