"""What limits a configuration, by the rules of `tuner.diagnosis` on its stored probes; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.diagnosis import diagnose, from_probe
from tuner.records import Capacity, Probe, Slo, TrialRecord
from tuner.report.model import FindingRow, Ref

SHOWN = 2
"""Findings shown a workload: the first, and the next where it is nearly as certain."""


def findings(slo: Slo, records: Sequence[TrialRecord], role: str) -> tuple[FindingRow, ...]:
    """For each workload, from the valid probe nearest to the capacity: there the limit shows, not far below it."""
    rows: list[FindingRow] = []
    for workload in dict.fromkeys(name for record in records for name in record.capacities):
        usable = [
            (record, probe)
            for record in records
            if workload in record.capacities
            for probe in record.capacities[workload].probes
            if probe.validity.valid and probe.classes and probe.telemetry is not None
        ]
        if usable:
            record, probe = min(usable, key=lambda pair: _distance(pair[0].capacities[workload], pair[1]))
            rows += _rows(slo, record, probe, role)
    return tuple(rows)


def _distance(capacity: Capacity, probe: Probe) -> float:
    return abs(math.log(probe.rate_rps / capacity.rate_rps))


def _rows(slo: Slo, record: TrialRecord, probe: Probe, role: str) -> list[FindingRow]:
    worst = max(probe.classes, key=lambda name: probe.classes[name].margin)
    found = diagnose(from_probe(probe, record.effective, slo.classes[worst]))
    shown = [finding for finding in found[:SHOWN] if finding.confidence >= found[0].confidence / 2]
    return [
        FindingRow(
            role=role,
            workload=probe.workload,
            rate_rps=probe.rate_rps,
            name=finding.kind,
            confidence=finding.confidence,
            explanation=finding.explanation,
            evidence=finding.evidence,
            ref=Ref(record.number, record.replicate),
            requests_file=probe.requests_file,
        )
        for finding in shown
    ]
