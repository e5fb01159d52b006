{{/* Short enough for a StatefulSet's pods and their revision label. */}}
{{- define "chipmesh.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- $name | trunc 28 | trimSuffix "-" -}}
{{- end }}

{{/* What a selector asks for: (dict "root" $ "component" NAME). */}}
{{- define "chipmesh.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
chipmesh.io/group: {{ . }}
{{- end }}
{{- end }}

{{- define "chipmesh.labels" -}}
{{ include "chipmesh.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* (dict "root" $ "image" NAME) */}}
{{- define "chipmesh.image" -}}
image: {{ printf "%s/%s:%s" .root.Values.images.prefix .image (.root.Values.images.tag | default .root.Chart.AppVersion) }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end }}

{{/* A group with its defaults, as YAML: (dict "root" $ "group" GROUP). */}}
{{- define "chipmesh.group" -}}
{{- $group := mergeOverwrite (deepCopy .root.Values.groupDefaults) (deepCopy .group) -}}
{{- if not $group.image }}{{ $_ := set $group "image" (printf "worker-%s" $group.backend) }}{{ end -}}
{{- if not (hasKey $group "modelPath") }}
{{- $served := dict }}
{{- range .root.Values.models.served }}{{ if eq .name $group.model }}{{ $served = . }}{{ end }}{{ end }}
{{- if not $served }}
{{- fail (printf "groups: group %q serves model %q, which models.served does not name" $group.name $group.model) }}
{{- end }}
{{- $_ := set $group "modelPath" ($served.path | default "") }}
{{- end -}}
{{- if and (gt (int $group.ranks) 1) (not .root.Values.tensorParallel.enabled) }}
{{- fail (printf "groups: group %q has ranks %d; this wants tensorParallel.enabled, and the LeaderWorkerSet controller" $group.name (int $group.ranks)) }}
{{- end -}}
{{- if and $group.autoscaling (gt (int $group.ranks) 1) }}
{{- fail (printf "groups: group %q has ranks and autoscaling; a LeaderWorkerSet is not scaled by this chart" $group.name) }}
{{- end -}}
{{- if and $group.autoscaling (not .root.Values.keda.prometheusAddress) }}
{{- fail (printf "groups: group %q has autoscaling, which wants keda.prometheusAddress" $group.name) }}
{{- end -}}
{{- $group | toYaml -}}
{{- end }}

{{- define "chipmesh.workerName" -}}
{{ include "chipmesh.fullname" .root }}-worker-{{ .group.name }}
{{- end }}

{{/* The ids that a group's workers may have, which are their (first) pods' names, one per line. */}}
{{- define "chipmesh.workerIds" -}}
{{- $name := include "chipmesh.workerName" . -}}
{{- $most := int .group.replicas -}}
{{- with .group.autoscaling }}{{ $most = max $most (int .maxReplicas) }}{{ end -}}
{{- range $replica := until (int $most) }}
{{ $name }}-{{ $replica }}
{{- end }}
{{- end }}

{{/* What a JSON schema cannot say. */}}
{{- define "chipmesh.checks" -}}
{{- $names := list }}
{{- range .Values.groups }}
{{- if has .name $names }}{{ fail (printf "groups: the name %q is given twice" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- $group := include "chipmesh.group" (dict "root" $ "group" .) | fromYaml }}
{{- with $group.autoscaling }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "groups: group %q has minReplicas above maxReplicas" $group.name) }}{{ end }}
{{- end }}
{{- end }}
{{- with .Values.gateway.autoscaling }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail "gateway.autoscaling has minReplicas above maxReplicas" }}{{ end }}
{{- end }}
{{- with .Values.networkPolicy.executorPorts }}
{{- if lt (int .to) (add (int .from) 99) }}{{ fail "networkPolicy.executorPorts needs 100 ports at least: from them also come the pods' own connections" }}{{ end }}
{{- end }}
{{- if and .Values.models.pull (not .Values.models.claim.enabled) }}
{{- fail "models.pull needs models.claim.enabled: each pod would have an empty folder of its own" }}
{{- end }}
{{- end }}
