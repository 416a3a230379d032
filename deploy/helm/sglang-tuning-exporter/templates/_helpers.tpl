{{- define "exporter.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "exporter.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "exporter.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}-tuning
{{- end }}
{{- /* NAME=VALUE of a mapping, with a separator between them that no value has. */ -}}
{{- define "exporter.pairs" -}}
{{- $pairs := list -}}
{{- range $name, $value := .of -}}
{{- if contains $.separator (toString $value) -}}{{- fail (printf "%s: %v: give it without %q" $name $value $.separator) -}}{{- end -}}
{{- $pairs = append $pairs (printf "%s=%v" $name $value) -}}
{{- end -}}
{{- join $.separator $pairs -}}
{{- end }}
{{- /* The generated rules with the severities and labels of the values, without alerts that are off. */ -}}
{{- define "exporter.rules" -}}
{{- $rules := .Files.Get "files/rules/sglang-tuning.rules.yml" | fromYaml -}}
{{- $wishes := .Values.prometheusRule.alerts -}}
{{- $known := dict -}}
{{- $groups := list -}}
{{- range $group := $rules.groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- $off := false -}}
{{- with $rule.alert -}}
{{- $_ := set $known . true -}}
{{- $wish := get $wishes . | default dict -}}
{{- if hasKey $wishes . -}}{{- $wish = get $wishes . -}}{{- end -}}
{{- $off = or (eq (toString $wish) "off") (eq (toString $wish) "false") -}}
{{- $labels := merge (dict) $.Values.prometheusRule.alertLabels ($rule.labels | default dict) -}}
{{- if kindIs "map" $wish -}}
{{- $labels = merge ($wish.labels | default dict) $labels -}}
{{- with $wish.severity -}}{{- $_ := set $labels "severity" . -}}{{- end -}}
{{- else if not $off -}}
{{- $_ := set $labels "severity" (toString $wish) -}}
{{- end -}}
{{- if $labels -}}{{- $_ := set $rule "labels" $labels -}}{{- end -}}
{{- end -}}
{{- if not $off -}}{{- $kept = append $kept $rule -}}{{- end -}}
{{- end -}}
{{- if $kept -}}{{- $groups = append $groups (dict "name" $group.name "rules" $kept) -}}{{- end -}}
{{- end -}}
{{- range $name, $_ := $wishes -}}
{{- if not (hasKey $known $name) -}}{{- fail (printf "prometheusRule.alerts.%s: no such alert; docs/reference/alerts.md lists them" $name) -}}{{- end -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end }}
