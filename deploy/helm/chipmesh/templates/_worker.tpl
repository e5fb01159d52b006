{{/* The worker's id, in a shell: its pod's name; of ranks over several pods the first one's, whose certificate all have. */}}
{{- define "chipmesh.workerId" -}}
{{ if gt (int .of.ranks) 1 }}${LWS_LEADER_ADDRESS%%.*}{{ else }}$POD_NAME{{ end }}
{{- end }}

{{/*
Writes the worker's configuration with what only the pod knows: its id, and its address, which is where the
scheduler finds the executor (an address, not a name, so that no stale look-up stands between a new pod and its traffic).
LWS_*: of the LeaderWorkerSet controller, for all containers.
*/}}
{{- define "chipmesh.identity" -}}
- name: identity
  {{- include "chipmesh.image" . | nindent 2 }}
  command: [sh, -ec]
  args:
    - |
      id="{{ include "chipmesh.workerId" . }}"
      cp /etc/chipmesh-group/*.json /etc/chipmesh/
      printf '{"worker_id": "%s", "executor": {"advertise": "%s"}}\n' "$id" "$POD_IP" \
        > /etc/chipmesh/50-identity.json
      {{- if gt (int .of.ranks) 1 }}
      printf '{"rendezvous": "%s:29600", "first_rank": %d}\n' "$LWS_LEADER_ADDRESS" \
        "$((LWS_WORKER_INDEX * {{ len (dig "config" "devices" (list 0) .of) }}))" > /etc/chipmesh/55-rank.json
      {{- end }}
      {{- if ne .root.Values.tls.mode "none" }}
      folder="/etc/chipmesh-tls/$id"
      printf '{"tls": {"certificate": "%s", "key": "%s", "authority": "%s"}}\n' \
        "$folder/certificate.pem" "$folder/key.pem" "$folder/authority.pem" > /etc/chipmesh/60-tls.json
      {{- end }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- include "chipmesh.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: group, mountPath: /etc/chipmesh-group, readOnly: true}
    - {name: configuration, mountPath: /etc/chipmesh}
{{- end }}

{{- define "chipmesh.waitForCertificate" -}}
- name: certificate
  {{- include "chipmesh.image" . | nindent 2 }}
  command: [sh, -ec]
  args:
    - |
      id="{{ include "chipmesh.workerId" . }}"
      until test -s "/etc/chipmesh-tls/$id/certificate.pem"; do
        echo "waiting for Secret {{ .root.Values.tls.secretPrefix }}-worker-$id"; sleep 2
      done
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- include "chipmesh.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: tls, mountPath: /etc/chipmesh-tls, readOnly: true}
{{- end }}

{{/* A worker's pod: (dict "root" $ "component" "worker" "image" IMAGE "group" NAME "of" GROUP with its defaults). */}}
{{- define "chipmesh.workerPod" -}}
{{- $root := .root }}
{{- $group := .of -}}
metadata:
  labels: {{- include "chipmesh.selector" . | nindent 4 }}
  annotations:
    checksum/configuration: {{ include "chipmesh.workerConfiguration" (dict "root" $root "group" $group) | sha256sum }}
spec:
  {{- include "chipmesh.podSecurity" $root | nindent 2 }}
  securityContext:
    {{- include "chipmesh.podSecurityContext" $root | nindent 4 }}
    {{- with $group.supplementalGroups }}
    supplementalGroups: {{- toYaml . | nindent 6 }}
    {{- end }}
    # Executors take free ports, since a swap runs two of them: from this range, which the network policy opens.
    sysctls:
      - name: net.ipv4.ip_local_port_range
        value: {{ printf "%d %d" (int $root.Values.networkPolicy.executorPorts.from) (int $root.Values.networkPolicy.executorPorts.to) | quote }}
  # drain_timeout_s, then the executor's end.
  terminationGracePeriodSeconds: {{ add $group.drainSeconds 10 }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with include "chipmesh.placement" $group | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  initContainers:
    {{- include "chipmesh.identity" . | nindent 4 }}
    {{- if ne $root.Values.tls.mode "none" }}
    {{- include "chipmesh.waitForCertificate" . | nindent 4 }}
    {{- end }}
    {{- if $root.Values.models.pull }}
    {{- include "chipmesh.waitForModels" . | nindent 4 }}
    {{- end }}
  containers:
    - name: worker
      {{- include "chipmesh.image" . | nindent 6 }}
      args: [worker, --config, /etc/chipmesh]
      {{- include "chipmesh.containerSecurity" $root | nindent 6 }}
      {{- with $group.environment }}
      env:
        {{- range $name, $value := . }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8080}
      # Until the model is loaded and its first forward pass checked.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: {{ div (add $group.loadSeconds 4) 5 }}
      {{- include "chipmesh.probes" 2 | nindent 6 }}
      resources: {{- toYaml $group.resources | nindent 8 }}
      volumeMounts:
        - {name: configuration, mountPath: /etc/chipmesh, readOnly: true}
        - {name: models, mountPath: /var/lib/chipmesh}
        - {name: tmp, mountPath: /tmp}
        {{- if ne $root.Values.tls.mode "none" }}
        - {name: tls, mountPath: /etc/chipmesh-tls, readOnly: true}
        {{- end }}
        {{- if $group.sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- range $group.hostFolders }}
        - {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
        {{- end }}
  volumes:
    - name: group
      configMap: {name: {{ include "chipmesh.workerName" (dict "root" $root "group" $group) }}}
    - name: configuration
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    {{- include "chipmesh.modelVolume" $root | nindent 4 }}
    {{- include "chipmesh.tmpVolume" $root | nindent 4 }}
    {{- if ne $root.Values.tls.mode "none" }}
    # All of the group's certificates, each in a folder of its worker: a StatefulSet cannot name one Secret per pod.
    # None is needed by the others, so a pod starts without them; its own it waits for.
    - name: tls
      projected:
        defaultMode: 0440
        sources:
          {{- range splitList "\n" (include "chipmesh.workerIds" (dict "root" $root "group" $group) | trim) }}
          {{- include "chipmesh.tlsSource" (dict "root" $root "role" "worker" "name" . "folder" (printf "%s/" .) "optional" true) | nindent 10 }}
          {{- end }}
    {{- end }}
    {{- with $group.sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- range $group.hostFolders }}
    - name: {{ .name }}
      hostPath: {path: {{ .path }}, type: Directory}
    {{- end }}
{{- end }}
