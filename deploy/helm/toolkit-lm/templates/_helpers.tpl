{{- define "toolkit-lm.name" -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- define "toolkit-lm.selector" -}}
app.kubernetes.io/name: toolkit-lm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "toolkit-lm.labels" -}}
{{ include "toolkit-lm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
