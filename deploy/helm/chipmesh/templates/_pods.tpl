{{/* What all pods have in common. User and group as in deploy/docker/Dockerfile. */}}
{{- define "chipmesh.podSecurity" -}}
serviceAccountName: {{ include "chipmesh.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "chipmesh.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "chipmesh.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Where pods go: a service's or a group's part of the values. */}}
{{- define "chipmesh.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Liveness asks for /live, which answers whenever the process and its event loop do: a gateway without a scheduler and
a worker that loads are alive. Readiness asks for /health, which says whether the service serves; as often as given may it
say no.
*/}}
{{- define "chipmesh.probes" -}}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ . }}
livenessProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "chipmesh.modelVolume" -}}
- name: models
  {{- if .Values.models.claim.enabled }}
  persistentVolumeClaim:
    claimName: {{ .Values.models.claim.existing | default (printf "%s-models" (include "chipmesh.fullname" .)) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{- define "chipmesh.tmpVolume" -}}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- end }}

{{/* Waits until the pulled models lie in the volume; they appear there in one piece. */}}
{{- define "chipmesh.waitForModels" -}}
- name: models
  {{- include "chipmesh.image" . | nindent 2 }}
  command: [sh, -ec]
  args:
    - |
      for name in {{ join " " .root.Values.models.pull }}; do
        until test -d "/var/lib/chipmesh/models/$name"; do echo "waiting for model $name"; sleep 2; done
      done
  {{- include "chipmesh.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: models, mountPath: /var/lib/chipmesh, readOnly: true}
{{- end }}

{{/* One service's Secret in a projected volume: (dict "root" $ "role" ROLE "name" NAME "folder" PREFIX "optional" BOOL). */}}
{{- define "chipmesh.tlsSource" -}}
{{- $own := eq .root.Values.tls.mode "certManager" -}}
- secret:
    name: {{ .root.Values.tls.secretPrefix }}-{{ .role }}-{{ .name }}
    {{- if .optional }}
    optional: true
    {{- end }}
    items:
      - {key: {{ ternary "tls.crt" "certificate.pem" $own }}, path: {{ .folder }}certificate.pem}
      - {key: {{ ternary "tls.key" "key.pem" $own }}, path: {{ .folder }}key.pem}
      - {key: {{ ternary "ca.crt" "authority.pem" $own }}, path: {{ .folder }}authority.pem}
{{- end }}

{{/* Everyone of the group may read it, which is user 10001 alone; others may not. */}}
{{- define "chipmesh.tlsVolume" -}}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      {{- include "chipmesh.tlsSource" . | nindent 6 }}
{{- end }}
