"""Small schemas of the custom resources that the chart uses: the fields that we set, and nothing beside them.

Written after the projects' own types (KEDA 2, cert-manager 1, the Prometheus operator, LeaderWorkerSet 1),
which kubernetes-validate does not have. A field that we begin to use is to be looked up there and added here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
HOURS: Schema = {"type": "string", "pattern": "^[1-9][0-9]*h$"}


def _exactly(required: Schema, **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": sorted(required),
        "additionalProperties": False,
    }


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


ISSUER_REF = _exactly(
    {"name": TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": {"const": "cert-manager.io"}}
)
SCALE_DOWN = _exactly({
    "stabilizationWindowSeconds": COUNT,
    "policies": _list_of(
        _exactly({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT})
    ),
})  # fmt: skip

SPECS: dict[tuple[str, str], Schema] = {
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            _exactly({"selfSigned": {"type": "object", "maxProperties": 0}}),
            _exactly({"ca": _exactly({"secretName": TEXT})}),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): _exactly(
        {
            "secretName": TEXT,
            "issuerRef": ISSUER_REF,
            "duration": HOURS,
            "renewBefore": HOURS,
            "privateKey": _exactly(
                {
                    "algorithm": {"const": "ECDSA"},
                    "size": {"enum": [256, 384, 521]},
                    "rotationPolicy": {"enum": ["Never", "Always"]},
                }
            ),
        },
        isCA={"type": "boolean"},
        commonName=TEXT,
        dnsNames=_list_of(TEXT),
        uris=_list_of({"type": "string", "pattern": "^chipmesh://[a-z]+/[a-z0-9-]+$"}),
        usages=_list_of({"enum": ["digital signature", "client auth", "server auth"]}),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _exactly({
        "scaleTargetRef": _exactly(
            {"apiVersion": {"const": "apps/v1"}, "kind": {"const": "StatefulSet"}, "name": TEXT}
        ),
        "minReplicaCount": COUNT,
        "maxReplicaCount": COUNT,
        "pollingInterval": COUNT,
        "cooldownPeriod": COUNT,
        "triggers": _list_of(
            _exactly({
                "type": {"const": "prometheus"},
                # KEDA takes texts here, numbers too.
                "metadata": _exactly({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}),
            })
        ),
        "advanced": _exactly({
            "horizontalPodAutoscalerConfig": _exactly({"behavior": _exactly({"scaleDown": SCALE_DOWN})})
        }),
    }),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _exactly({
        "selector": _exactly({"matchLabels": {"type": "object", "minProperties": 1}}),
        "endpoints": _list_of(_exactly({
            "port": TEXT, "path": TEXT, "honorLabels": {"type": "boolean"},
            "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
        })),
    }),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _exactly({
        "groups": _list_of(_exactly({
            "name": TEXT,
            "rules": _list_of(_exactly(
                {
                    "alert": TEXT,
                    "expr": TEXT,
                    "labels": _exactly({"severity": {"enum": ["critical", "warning", "info"]}}),
                    "annotations": _exactly({"summary": TEXT, "description": TEXT}),
                },
                **{"for": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}},
            )),
        })),
    }),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _exactly({
        "replicas": COUNT,
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "leaderWorkerTemplate": _exactly({
            "size": COUNT,
            "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
            # A pod's template: checked as one, see test_chart_schemas.py.
            "workerTemplate": _exactly({"metadata": {"type": "object"}, "spec": {"type": "object"}}),
        }),
    }),
}  # fmt: skip
"""Of `spec`, by apiVersion and kind."""


def schema_of(manifest: dict[str, Any]) -> Schema:
    """The schema of a whole custom resource.

    Raises:
        KeyError: there is none of this apiVersion and kind.
    """
    spec = SPECS[manifest["apiVersion"], manifest["kind"]]
    metadata = _exactly({"name": TEXT, "labels": {"type": "object"}})
    return _exactly({"apiVersion": TEXT, "kind": TEXT, "metadata": metadata, "spec": spec})
