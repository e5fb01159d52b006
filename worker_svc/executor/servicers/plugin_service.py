"""PluginService: who the plugin is, what it can do, whether it is well."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.plugin_pb2 import (
    CapabilityReport,
    GetCapabilitiesRequest,
    GetCapabilitiesResponse,
    GetPluginInfoRequest,
    GetPluginInfoResponse,
    ProbeRequest,
    ProbeResponse,
)
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceServicer
from meshkit.rpc.handlers import Context
from plugins.sdk.backend import PluginInfo
from worker_svc.device_thread import DeviceThread
from worker_svc.step_engine import EngineState, StepEngine


class PluginService(PluginServiceServicer):
    """Identity of one plugin. Info and report were read at its load: no call touches the device.

    hung_after_s: a job of the device thread that takes longer, once a model is ready, counts as a hang.
    """

    def __init__(
        self,
        *,
        info: PluginInfo,
        report: CapabilityReport,
        instance_id: str,
        engine: StepEngine,
        device: DeviceThread,
        hung_after_s: float,
    ) -> None:
        self._info = GetPluginInfoResponse(
            name=info.name,
            plugin_version=info.plugin_version,
            contract_version=info.contract_version,
            runtime_version=info.runtime_version,
            collective_library_version=info.collective_library_version,
            framework_version=info.framework_version,
            instance_id=instance_id,
        )
        self._report = report
        self._engine = engine
        self._device = device
        self._hung_after_s = hung_after_s

    async def GetPluginInfo(self, request: GetPluginInfoRequest, context: Context) -> GetPluginInfoResponse:
        """Name and versions."""
        del request, context
        return self._info

    async def GetCapabilities(
        self, request: GetCapabilitiesRequest, context: Context
    ) -> GetCapabilitiesResponse:
        """The frozen report."""
        del request, context
        return GetCapabilitiesResponse(report=self._report)

    async def Probe(self, request: ProbeRequest, context: Context) -> ProbeResponse:
        """How the executor is now."""
        del request, context
        readiness, message = self._readiness()
        response = ProbeResponse(readiness=readiness, message=message)
        since = self._device.since_last_job()
        if since is not None:
            response.since_last_step.CopyFrom(_duration(since))
        return response

    def _readiness(self) -> tuple[ProbeResponse.Readiness.ValueType, str]:
        if self._engine.failure:
            return ProbeResponse.READINESS_UNHEALTHY, self._engine.failure
        if self._engine.state is not EngineState.READY:
            return ProbeResponse.READINESS_INITIALISING, self._engine.state.value
        busy_s = self._device.busy_for()
        if busy_s is not None and busy_s > self._hung_after_s:
            return ProbeResponse.READINESS_UNHEALTHY, (
                f"the device hangs: it has been at one step for {busy_s:.1f} s, longer than hung_after_s "
                f"{self._hung_after_s:g}"
            )
        work = "waits for work" if busy_s is None else f"at work for {busy_s:.3f} s"
        return ProbeResponse.READINESS_READY, f"{self._engine.occupied_slots} slots in use, {work}"


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
