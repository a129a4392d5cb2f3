{{- define "rollstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end }}

{{- define "rollstream.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rollstream.labels" -}}
{{ include "rollstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "rollstream.image" -}}
{{- with .Values.image -}}
{{- if .registry }}{{ .registry }}/{{ end }}{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "rollstream.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rollstream.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* What every process knows of Kafka. */}}
{{- define "rollstream.kafkaEnv" -}}
- {name: ROLLSTREAM_KAFKA__BOOTSTRAP, value: {{ .Values.kafka.bootstrap | quote }}}
- {name: ROLLSTREAM_KAFKA__PREFIX, value: {{ .Values.kafka.prefix | quote }}}
- {name: ROLLSTREAM_KAFKA__PARTITIONS, value: {{ .Values.kafka.partitions | int | quote }}}
- {name: ROLLSTREAM_KAFKA__REPLICATION, value: {{ .Values.kafka.replication | int | quote }}}
- {name: ROLLSTREAM_KAFKA__SESSION_TIMEOUT_MS, value: {{ .Values.kafka.sessionTimeoutMs | int | quote }}}
{{- with .Values.kafka.registryUrl }}
- {name: ROLLSTREAM_KAFKA__REGISTRY_URL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.kafka.existingSecret }}
{{- if .name }}
- name: ROLLSTREAM_KAFKA__PROPERTIES
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a process finds the content of large records. */}}
{{- define "rollstream.claimsEnv" -}}
- {name: ROLLSTREAM_CLAIMS__STORE, value: {{ .Values.claims.url | quote }}}
{{- with .Values.claims.existingSecret }}
{{- if .name }}
- name: ROLLSTREAM_CLAIMS__S3
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* The part of a pod that is the same in all. enableServiceLinks: Kubernetes would set ROLLSTREAM_..._PORT variables of
     its own, and an unknown ROLLSTREAM_ variable is an error. */}}
{{- define "rollstream.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rollstream.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Where a pod may run; called with the part's values. */}}
{{- define "rollstream.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Started, alive: the process answers on its metrics port. Lag is no reason to restart anything. */}}
{{- define "rollstream.metricsProbes" -}}
startupProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
