{{/*
Each template gives the data of a ConfigMap: files that a service reads from /etc/chipmesh in the order of their names,
later ones over earlier ones, objects field by field.
*/}}

{{- define "chipmesh.schedulerAddress" -}}
{{ include "chipmesh.fullname" . }}-scheduler:50061
{{- end }}

{{/* Of all services: (dict "root" $ "folder" where the service finds its certificate, or "" if its pod says that). */}}
{{- define "chipmesh.sharedConfiguration" -}}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
30-tracing.json: {{ dict "tracing" (dict "exporter" "otlp" "endpoint" .endpoint "sampling_ratio" .samplingRatio "max_traces_per_s" .maxTracesPerSecond) | toJson | quote }}
{{- end }}
{{- end }}
{{- if eq .root.Values.tls.mode "none" }}
40-tls.json: {{ dict "insecure_network" true | toJson | quote }}
{{- else if .folder }}
{{- $tls := dict "certificate" (printf "%s/certificate.pem" .folder) "key" (printf "%s/key.pem" .folder) "authority" (printf "%s/authority.pem" .folder) }}
40-tls.json: {{ dict "tls" $tls | toJson | quote }}
{{- end }}
{{- end }}

{{- define "chipmesh.gatewayConfiguration" -}}
{{- $own := dict
  "listen" "0.0.0.0:50051"
  "openai_listen" "0.0.0.0:8000"
  "http_listen" "0.0.0.0:8080"
  "scheduler_address" (include "chipmesh.schedulerAddress" .)
  "models" .Values.models.served
  "drain_grace_s" .Values.gateway.drainSeconds -}}
10-gateway.json: {{ mergeOverwrite (deepCopy .Values.gateway.config) $own | toPrettyJson | quote }}
{{- $clients := dict "api_keys_file" "/etc/chipmesh-clients/keys.json" }}
{{- if .Values.gateway.allowAnonymous }}{{ $clients = dict "allow_anonymous" true }}{{ end }}
{{- if .Values.gateway.tlsSecret }}
{{- $_ := set $clients "listen_tls" (dict "certificate" "/etc/chipmesh-listen/tls.crt" "key" "/etc/chipmesh-listen/tls.key") }}
{{- end }}
50-clients.json: {{ $clients | toPrettyJson | quote }}
{{- include "chipmesh.sharedConfiguration" (dict "root" . "folder" "/etc/chipmesh-tls") }}
{{- end }}

{{/* Who may call, as a file of its own that the gateway watches: a new key restarts nothing. */}}
{{- define "chipmesh.clients" -}}
{{- $keys := list }}
{{- range .Values.gateway.keys.entries }}
{{- $entry := deepCopy . }}
{{- if not .sha256 }}{{ $_ := set $entry "file" (printf "/etc/chipmesh-keys/%s" .name) }}{{ end }}
{{- $keys = append $keys $entry }}
{{- end }}
{{- if not $keys }}
{{- fail "gateway.keys.entries is empty: name a key, or set gateway.allowAnonymous where everyone who reaches the gateway may use it" }}
{{- end }}
{{- $keys | toPrettyJson }}
{{- end }}

{{- define "chipmesh.schedulerConfiguration" -}}
{{- $groups := list }}
{{- range .Values.groups }}
{{- $groups = append $groups (mergeOverwrite (deepCopy (.scheduling | default dict)) (dict "name" .name "model" .model)) }}
{{- end }}
{{- $own := dict
  "listen" "0.0.0.0:50061"
  "http_listen" "0.0.0.0:8080"
  "groups" $groups
  "strict_groups" true
  "traffic_file" "/etc/chipmesh-traffic/traffic.json"
  "drain_grace_s" .Values.scheduler.drainSeconds -}}
10-scheduler.json: {{ mergeOverwrite (deepCopy .Values.scheduler.config) $own | toPrettyJson | quote }}
{{- include "chipmesh.sharedConfiguration" (dict "root" . "folder" "/etc/chipmesh-tls") }}
{{- end }}

{{/* Weights of groups by model. The scheduler watches them, so a changed weight restarts nothing. */}}
{{- define "chipmesh.traffic" -}}
{{- $traffic := dict }}
{{- range .Values.groups }}
{{- $groups := get $traffic .model | default dict }}
{{- $weight := ternary .weight $.Values.groupDefaults.weight (hasKey . "weight") }}
{{- $_ := set $traffic .model (set $groups .name $weight) }}
{{- end }}
{{- $traffic | toPrettyJson }}
{{- end }}

{{/* (dict "root" $ "group" GROUP with its defaults). What only the pod knows comes from its init container. */}}
{{- define "chipmesh.workerConfiguration" -}}
{{- $group := .group }}
{{- $own := dict
  "listen" "127.0.0.1:50071"
  "http_listen" "0.0.0.0:8080"
  "group" $group.name
  "model" $group.model
  "model_path" $group.modelPath
  "scheduler_address" (include "chipmesh.schedulerAddress" .root)
  "executor" (dict "listen" "0.0.0.0:0")
  "drain_timeout_s" $group.drainSeconds }}
{{- with $group.threads }}{{ $_ := set $own.executor "threads" . }}{{ end }}
{{- $sizes := dict }}
{{- if gt (int $group.ranks) 1 }}
{{- $sizes = dict "tensor_parallel_size" (len (dig "config" "devices" (list 0) $group)) "pipeline_parallel_size" (int $group.ranks) }}
{{- end }}
{{- $chip := dict "backend" $group.backend }}
{{- with $group.backendOptions }}{{ $_ := set $chip "backend_options" . }}{{ end -}}
10-worker.json: {{ mergeOverwrite $sizes (deepCopy ($group.config | default dict)) $own | toPrettyJson | quote }}
20-chip.json: {{ $chip | toJson | quote }}
{{- include "chipmesh.sharedConfiguration" (dict "root" .root "folder" "") }}
{{- end }}
