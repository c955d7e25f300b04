{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "penstock.secret" -}}
{{ .Values.existingSecret | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{/* Labels of a part: (dict "root" . "part" "engines") */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.fleetKey" -}}
- name: PENSTOCK_FLEET_KEY
  valueFrom: {secretKeyRef: {name: {{ include "penstock.secret" . }}, key: fleet-key}}
{{- end }}

{{/* The pod of an engine, which is ready when it listens. SIGTERM lets its requests end or move. */}}
{{- define "penstock.enginePod" -}}
metadata:
  labels: {{- include "penstock.labels" (dict "root" . "part" "engines") | nindent 4 }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add .Values.engine.drainSeconds 15 }}
  securityContext: {{- include "penstock.podSecurity" . | nindent 4 }}
  {{- with .Values.engine.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.engine.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "penstock.selector" (dict "root" . "part" "engines") | nindent 10 }}
  containers:
    - name: engine
      image: {{ include "penstock.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - engine
        - {{ .Values.model | quote }}
        - --listen=0.0.0.0:9000
        - --drain-timeout={{ max .Values.engine.drainSeconds 1 }}
        {{- range .Values.engine.arguments }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "penstock.fleetKey" . | nindent 8 }}
        - {name: HOME, value: /tmp}
        - {name: HF_HOME, value: /weights}
      ports:
        - {name: engine, containerPort: 9000}
      startupProbe:
        tcpSocket: {port: engine}
        periodSeconds: 5
        failureThreshold: {{ div .Values.engine.startSeconds 5 }}
      readinessProbe:
        tcpSocket: {port: engine}
        periodSeconds: 5
      securityContext: {{- include "penstock.containerSecurity" . | nindent 8 }}
      resources: {{- toYaml .Values.engine.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: weights, mountPath: /weights}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory}}
    {{- if .Values.engine.weights.claim }}
    - {name: weights, persistentVolumeClaim: {claimName: {{ .Values.engine.weights.claim }}}}
    {{- else if .Values.engine.weights.nodePath }}
    - {name: weights, hostPath: {path: {{ .Values.engine.weights.nodePath }}, type: DirectoryOrCreate}}
    {{- else }}
    - {name: weights, emptyDir: {}}
    {{- end }}
{{- end }}
