#!/usr/bin/env bash
# A real multi-node Slurm cluster on one Debian 12 machine, as root, without systemd.
#
#   cluster.sh up [N_NODES [GPUS_PER_NODE]]   start (or heal) nodes n1..nN; default 4 4
#   cluster.sh down                           stop everything, keep only the logs (until the next up)
#   cluster.sh kill-node NAME                 "power loss": SIGKILL every process of a node
#   cluster.sh revive-node NAME               boot it again (also clears DOWN/DRAIN)
#   cluster.sh restart-ctld [TERM|KILL]       stop slurmctld with that signal and start it again
#   cluster.sh exec NAME CMD...               run a command on a node
#   cluster.sh env                            print the exports a client needs
#   cluster.sh status
#
# Clients: eval "$(cluster.sh env)", then sbatch/srun/sacct as usual.
# Test hooks: executables dropped into $SLURM_LAB_DIR/hooks/{prolog,epilog,healthcheck}.d run on
# every node, as root; one that fails fails the hook. SLURMD_NODENAME names the node.
#
# A killed node is DOWN after ~13 s (ns) or ~35 s (flat); to skip the wait, tell Slurm:
# scontrol update nodename=NAME state=down reason=killed
#
# Modes.  ns: one network+uts+pid+mount namespace per node (own hostname, IP address, ports, process
# tree, /dev/shm), joined by a bridge. flat: all slurmd share the machine's namespaces and differ by
# port; for containers without CAP_SYS_ADMIN. auto takes ns where it works.
set -euo pipefail

LAB=${SLURM_LAB_DIR:-/tmp/slurm-lab}
NET=${SLURM_LAB_NET:-10.77.0}                # first three octets of the node network (ns mode)
PORT=${SLURM_LAB_PORT:-17800}                # slurmctld; +1 slurmdbd; +10+i slurmd of node i
CPUS=${SLURM_LAB_CPUS:-16}                   # declared per node, whatever the machine has
MEM=${SLURM_LAB_MEM_MB:-64000}               # declared per node
NODE_TIMEOUT=${SLURM_LAB_NODE_TIMEOUT:-8}    # SlurmdTimeout; a killed node is DOWN a few seconds later
WANT_MODE=${SLURM_LAB_MODE:-auto}            # auto | ns | flat
BOOT_TIMEOUT=${SLURM_LAB_BOOT_TIMEOUT:-120}    # for what does not come up, or down, at all

SELF=$(readlink -f "$0")
BRIDGE=slab$(cksum <<<"$LAB" | cut -c1-6)
CONF=$LAB/etc/slurm.conf
export SLURM_CONF=$CONF LC_ALL=C.UTF-8
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH

say() { echo "cluster.sh: $*" >&2; }
die() { say "ERROR: $*"; exit 1; }
show_log() { [[ -f $LAB/log/$1 ]] && { say "last lines of $LAB/log/$1:"; tail -n 15 "$LAB/log/$1" >&2; }; return 0; }

# ---------------------------------------------------------------- processes
# A zombie counts as dead: a container's PID 1 often never reaps what it inherits.
# The name and the command line are checked as well, since pids get reused.
alive() { # alive PID TEXT-IN-COMMAND-LINE
    local stat
    [[ -n ${1:-} ]] && stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    [[ ${stat##*) } != [ZX]* ]] && tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -- "$2"
}
pid_of() { cat "$LAB/run/$1.pid" 2>/dev/null || true; }
text_of() { # what the command line of a daemon must contain
    case $1 in
        munged) echo "--socket=$LAB/run/munge.sock" ;;
        mariadbd) echo "--datadir=$LAB/db" ;;
        slurmdbd) echo slurmdbd ;;
        slurmctld) echo "slurmctld -D -f $CONF" ;;
        *) [[ $MODE == ns ]] && echo "__node $1" || echo "slurmd -D -N $1 -f $CONF" ;;
    esac
}
up_p() { alive "$(pid_of "$1")" "$(text_of "$1")"; }
launch() { # launch NAME CMD...: detached, output in log/NAME.out, pid in run/NAME.pid
    local name=$1; shift
    setsid "$@" >>"$LAB/log/$name.out" 2>&1 </dev/null 9>&- &
    echo $! >"$LAB/run/$name.pid"
}
wait_for() { # wait_for WHAT CMD...
    local end=$((SECONDS + BOOT_TIMEOUT)) what=$1 out; shift
    until out=$("$@" 2>&1); do
        ((SECONDS < end)) || { say "timed out waiting for $what${out:+: $out}"; return 1; }
        sleep 0.05
    done
}
stop() { # stop NAME SIGNAL
    if up_p "$1"; then kill "-$2" "$(pid_of "$1")" && wait_for "$1 to stop" dead "$1" || die "$1 does not stop"; fi
}
dead() { ! up_p "$1"; }

# ---------------------------------------------------------------- set-up
install_packages() {
    local pkgs=() need
    for need in slurmctld:slurmctld slurmd:slurmd slurmdbd:slurmdbd sbatch:slurm-client sacct:slurm-client \
        munged:munge mariadbd:mariadb-server-core mariadb-install-db:mariadb-server-core \
        mariadb:mariadb-client-core ip:iproute2 unshare:util-linux flock:util-linux; do
        [[ " ${pkgs[*]} " == *" ${need#*:} "* ]] || command -v "${need%%:*}" >/dev/null || pkgs+=("${need#*:}")
    done
    ((${#pkgs[@]})) || return 0
    local log=$LAB/log/apt.log
    say "installing: ${pkgs[*]} (log: $log)"
    export DEBIAN_FRONTEND=noninteractive
    # mariadb-server-core, not mariadb-server: only the binaries, no service that would start by itself.
    local get=(apt-get install -y --no-install-recommends "${pkgs[@]}")
    "${get[@]}" >"$log" 2>&1 || { apt-get update >>"$log" 2>&1 && "${get[@]}" >>"$log" 2>&1; } ||
        { show_log apt.log; die "apt-get install failed"; }
}
pick_mode() {
    local probe='ip link add slabp0 type veth peer name slabp1 && ip link add slabp2 type bridge && mount -t proc proc /proc'
    case $WANT_MODE in
        ns | flat) echo "$WANT_MODE" ;;
        auto) if unshare --mount --uts --net --pid --fork sh -c "$probe" >/dev/null 2>&1; then echo ns; else echo flat; fi ;;
        *) die "SLURM_LAB_MODE must be auto, ns or flat, not '$WANT_MODE'" ;;
    esac
}
node_addr() { if [[ $MODE == ns ]]; then echo "$NET.$((10 + $1))"; else echo 127.0.0.1; fi; }
head_addr() { if [[ $MODE == ns ]]; then echo "$NET.1"; else echo 127.0.0.1; fi; }
nodes() { seq -f 'n%g' 1 "$N"; }

write_config() {
    local host i g head; host=$(hostname) host=${host%%.*} head=$(head_addr)
    mkdir -p "$LAB"/{etc,run,state,spool,log,dev,hooks/{prolog,epilog,healthcheck}.d}

    { # the nodes' /etc/hosts (ns mode); flat mode needs the machine's own, see up()
        echo "127.0.0.1 localhost"
        echo "$head $host"
        for ((i = 1; i <= N; i++)); do echo "$(node_addr "$i") n$i"; done
    } >"$LAB/etc/hosts"

    for hook in prolog epilog healthcheck; do
        cat >"$LAB/hooks/$hook" <<E
#!/bin/bash
export SLURM_CONF=$CONF PATH=/usr/sbin:/usr/bin:/sbin:/bin
export SLURMD_NODENAME=\${SLURMD_NODENAME:-\$(hostname)}
for f in $LAB/hooks/$hook.d/*; do
    [[ -x \$f ]] || continue
    "\$f" || exit \$?
done
exit 0
E
        chmod 755 "$LAB/hooks/$hook"
    done

    cat >"$CONF" <<E
ClusterName=lab
# never the ids of an earlier cluster: submitit would take old files for new results
FirstJobId=$((EPOCHSECONDS % 60000000))
SlurmctldHost=$host($head)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120 s)
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.slurm-pid
SlurmdPidFile=$LAB/run/%n.slurm-pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none

# no cgroups
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5

# declared sizes win over what the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
GresTypes=gpu
TopologyPlugin=topology/tree

# fast
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_max_time=5,nohold_on_prolog_fail
PriorityType=priority/basic
SlurmdTimeout=$NODE_TIMEOUT
SlurmctldTimeout=10
MessageTimeout=10
TCPTimeout=1
KillWait=3
CompleteWait=0
EpilogMsgTime=0
InactiveLimit=0
MinJobAge=3600
UnkillableStepTimeout=120
BatchStartTimeout=20

# faults
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PrologFlags=Alloc
PrologEpilogTimeout=30
Prolog=$LAB/hooks/prolog
Epilog=$LAB/hooks/epilog
HealthCheckProgram=$LAB/hooks/healthcheck
HealthCheckInterval=5
HealthCheckNodeState=ANY

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$head
AccountingStoragePort=$((PORT + 1))
AccountingStoragePass=$LAB/run/munge.sock
AccountingStorageTRES=gres/gpu
# refuse unknown accounts and qos, as most sites do; root's own association comes with the cluster
AccountingStorageEnforce=associations,qos

E
    local gres=""; ((G)) && gres=" Gres=gpu:$G"
    echo "AutoDetect=off" >"$LAB/etc/gres.conf"
    for ((i = 1; i <= N; i++)); do
        local h=$host; [[ $MODE == ns ]] && h=n$i
        echo "NodeName=n$i NodeHostname=$h NodeAddr=$(node_addr "$i") Port=$((PORT + 10 + i)) CPUs=$CPUS RealMemory=$MEM$gres State=UNKNOWN" >>"$CONF"
        mkdir -p "$LAB/spool/n$i" "$LAB/dev/n$i"
        for ((g = 0; g < G; g++)); do # Slurm only wants the device file to exist
            [[ -e $LAB/dev/n$i/gpu$g ]] || mknod "$LAB/dev/n$i/gpu$g" c 1 3 2>/dev/null || touch "$LAB/dev/n$i/gpu$g"
            echo "NodeName=n$i Name=gpu File=$LAB/dev/n$i/gpu$g" >>"$LAB/etc/gres.conf"
        done
    done
    cat >>"$CONF" <<E
PartitionName=DEFAULT Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=main Default=YES MaxTime=INFINITE DefaultTime=60
PartitionName=short MaxTime=2 DefaultTime=1
PartitionName=low MaxTime=INFINITE DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
E
    # slurmd looks for a cgroup plugin even if none is used: v1 wants nothing, v2 wants systemd
    echo "CgroupPlugin=cgroup/v1" >"$LAB/etc/cgroup.conf"
    { # leaf switches of two nodes
        local leaves=0
        for ((i = 1; i <= N; i += 2)); do
            echo "SwitchName=leaf$((++leaves)) Nodes=n$i$( ((i == N)) || echo ",n$((i + 1))")"
        done
        if ((leaves > 1)); then echo "SwitchName=spine Switches=leaf[1-$leaves]"; fi
    } >"$LAB/etc/topology.conf"

    (umask 077; cat >"$LAB/etc/slurmdbd.conf" <<E
DbdHost=localhost
DbdAddr=$head
DbdPort=$((PORT + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.sock
PidFile=$LAB/run/slurmdbd.slurm-pid
LogFile=$LAB/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
E
    )
    cat >"$LAB/etc/my.cnf" <<E
[mysqld]
skip-networking
skip-log-bin
innodb-log-file-size=8M
innodb-buffer-pool-size=32M
innodb-flush-method=nosync
innodb-flush-log-at-trx-commit=0
innodb-doublewrite=0
innodb-lock-wait-timeout=900
E
    [[ -f $LAB/etc/munge.key ]] || (umask 077; head -c 128 /dev/urandom >"$LAB/etc/munge.key")
}

# ---------------------------------------------------------------- daemons
start_munged() {
    up_p munged && return
    launch munged munged -F --force --key-file="$LAB/etc/munge.key" --socket="$LAB/run/munge.sock" \
        --pid-file="$LAB/run/munged.own-pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munge.seed"
    wait_for munged munge -n --socket="$LAB/run/munge.sock" || { show_log "munged.out"; die "munged did not start"; }
}
sql() { mariadb --no-defaults --socket="$LAB/run/mysql.sock" -u root -e "$1"; }
start_db() {
    up_p mariadbd && return
    if [[ ! -d $LAB/db/mysql ]]; then
        rm -rf "$LAB/db"
        mariadb-install-db --defaults-file="$LAB/etc/my.cnf" --user=root --datadir="$LAB/db" --skip-test-db \
            --auth-root-authentication-method=normal >"$LAB/log/mariadb-install.log" 2>&1 ||
            { show_log mariadb-install.log; die "mariadb-install-db failed"; }
    fi
    launch mariadbd mariadbd --defaults-file="$LAB/etc/my.cnf" --user=root --datadir="$LAB/db" \
        --socket="$LAB/run/mysql.sock" --pid-file="$LAB/run/mariadbd.own-pid"
    wait_for mariadbd sql 'select 1' || { show_log "mariadbd.out"; die "mariadbd did not start"; }
    sql 'create database if not exists slurm_acct_db'
}
start_dbd() {
    up_p slurmdbd && return
    launch slurmdbd env MYSQL_UNIX_PORT="$LAB/run/mysql.sock" slurmdbd -D
    wait_for slurmdbd sacctmgr -n show cluster || { show_log "slurmdbd.out"; die "slurmdbd did not start"; }
    [[ -n $(sacctmgr -nP show cluster lab) ]] || sacctmgr -iQ add cluster lab >/dev/null ||
        die "sacctmgr could not add the cluster"
}
start_ctld() {
    up_p slurmctld && return
    launch slurmctld slurmctld -D -f "$CONF"
    wait_for slurmctld ctld_ok || { show_log "slurmctld.out"; die "slurmctld did not start"; }
}
ctld_ok() { scontrol ping | grep 'is UP'; }
start_node() {
    local name=$1 pid
    up_p "$name" && { [[ $MODE == flat ]] || slurmd_up "$name"; } && return
    date +%s >"$LAB/run/$name.boot"
    if [[ $MODE == flat ]]; then
        launch "$name" env SLURMD_NODENAME="$name" slurmd -D -N "$name" -f "$CONF"
        return
    elif up_p "$name"; then # only its slurmd is gone
        on_node "$name" setsid slurmd -N "$name" -f "$CONF" >>"$LAB/log/$name.out" 2>&1 9>&-
        return
    fi
    launch "$name" unshare --mount --uts --net --pid --fork --kill-child "$SELF" __node "$name" "$NET.$((10 + ${name#n}))"
    pid=$(pid_of "$name")
    wait_for "the namespaces of $name" other_netns "$pid" || { show_log "$name.out"; die "unshare failed for $name"; }
    ip route del unreachable "$NET.$((10 + ${name#n}))/32" 2>/dev/null || true
    ip link add "$BRIDGE-$name" type veth peer name eth0 netns "$pid" &&
        ip link set "$BRIDGE-$name" master "$BRIDGE" up || { show_log "$name.out"; die "no network link for $name \
(pid $pid in $(readlink "/proc/$pid/ns/net"), this machine in $(readlink /proc/self/ns/net))"; }
}
on_node() { # on_node NAME CMD...
    local pid; pid=$(pid_of "$1")
    if [[ $MODE == ns ]]; then
        read -r pid _ <"/proc/$pid/task/$pid/children" || true
        nsenter -t "$pid" -m -u -n -p -- "${@:2}"
    else
        SLURMD_NODENAME=$1 "${@:2}"
    fi
}
slurmd_up() { on_node "$1" sh -c "kill -0 \$(cat '$LAB/run/$1.slurm-pid')" 2>/dev/null; }
other_netns() { # one that cannot be read is no other one: a link into this machine's own would meet its eth0
    local of own
    of=$(readlink "/proc/$1/ns/net") && own=$(readlink /proc/self/ns/net) && [[ $of == net:* && $of != "$own" ]]
}
node_main() { # PID 1 of a node: bash reaps orphans while it waits
    trap 'exit 0' TERM
    hostname "$1"
    mount -t proc proc /proc
    mount --bind "$LAB/etc/hosts" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    ip link set lo up
    wait_for eth0 ip link show eth0 || exit 1
    ip addr add "$2/24" dev eth0
    ip link set eth0 up
    cd /
    slurmd -D -N "$1" -f "$CONF" &
    sleep infinity & # the node outlives its slurmd, as a real one does
    wait
}
node_state() { sinfo -h -N -n "$1" -o %T 2>/dev/null | head -1; }
revived() { node_ok "$1" || { scontrol update nodename="$1" state=resume; return 1; }; }
node_ok() { # usable, and its slurmd has registered since start_node: until then Slurm calls it idle as well
    local since; since=$(scontrol show node "$1" | grep -oP 'SlurmdStartTime=\K\S+')
    [[ $(node_state "$1") =~ ^(idle|mixed|allocated|completing)$ ]] &&
        (($(date -d "${since/None/1970-01-01}" +%s) >= $(cat "$LAB/run/$1.boot")))
}

kill_node() {
    local name=$1 pid p
    pid=$(pid_of "$name")
    if [[ $MODE == ns ]]; then # --kill-child takes PID 1 of the node down, and the kernel all the rest
        if up_p "$name"; then kill -9 "$pid" || true; fi
        wait_for "$name to die" dead "$name" || die "$name would not die"
        # a socket still closing can hold the dead node's network namespace, and with it the link
        no_link "$name" >/dev/null 2>&1 || ip link del "$BRIDGE-$name" 2>/dev/null || true
        wait_for "the link of $name to go" no_link "$name" || die "$name left its link behind"
        # without this slurmctld would need 6 connection attempts of TCPTimeout each to notice
        ip route replace unreachable "$NET.$((10 + ${name#n}))/32"
    else
        if up_p "$name"; then kill -9 "$pid" || true; fi
        # the node's slurmstepd listen on sockets in its spool directory; its tasks carry its name
        for p in $(ss -xlpH | grep -F "$LAB/spool/$name/" | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u) \
            $(grep -lsz -x "SLURMD_NODENAME=$name" /proc/[0-9]*/environ | cut -d/ -f3); do
            grep -qsz -x "SLURM_CONF=$CONF" "/proc/$p/environ" || grep -qs slurmstepd "/proc/$p/comm" || continue
            kill -9 "$p" 2>/dev/null || true
        done
    fi
    rm -f "$LAB/run/$name.pid"
}
no_link() { ! ip link show "$BRIDGE-$1"; }

# ---------------------------------------------------------------- commands
load_shape() { # sets N G MODE; fails if there is no cluster
    [[ -f $LAB/shape ]] && read -r N G MODE <"$LAB/shape"
}
need_node() {
    load_shape || die "no cluster in $LAB (run: up)"
    [[ ${1:-} =~ ^n([1-9][0-9]*)$ ]] && ((BASH_REMATCH[1] <= N)) || die "no node '${1:-}' (have n1..n$N)"
}
up() {
    local n=${1:-} g=${2:-} t0=$SECONDS node
    if load_shape; then
        [[ ${n:-$N} == "$N" && ${g:-$G} == "$G" ]] || die "$LAB already holds a cluster of $N nodes x $G GPUs; run 'down' first"
    else
        N=${n:-4} G=${g:-4}
        [[ $N =~ ^[1-9][0-9]*$ && $G =~ ^[0-9]+$ ]] && ((N <= 200)) || die "usage: up N_NODES GPUS_PER_NODE"
        rm -rf "$LAB/log"
        mkdir -p "$LAB/log"
        install_packages
        MODE=$(pick_mode)
        [[ $MODE == ns ]] || say "flat mode: nodes share this machine's hostname and processes"
        write_config
        echo "$N $G $MODE" >"$LAB/shape"
    fi
    if [[ $MODE == ns ]] && ! ip link show "$BRIDGE" >/dev/null 2>&1; then
        ip link add "$BRIDGE" type bridge && ip addr add "$NET.1/24" dev "$BRIDGE" && ip link set "$BRIDGE" up ||
            die "could not make bridge $BRIDGE with $NET.1/24 (in use? set SLURM_LAB_NET)"
    fi
    if [[ $MODE == flat ]]; then
        for node in $(nodes); do
            getent hosts "$node" >/dev/null || echo "127.0.0.1 $node # $BRIDGE" >>/etc/hosts
        done
    fi
    start_munged
    start_db
    start_dbd
    start_ctld
    for node in $(nodes); do start_node "$node"; done
    for node in $(nodes); do
        wait_for "$node (state: $(node_state "$node"))" node_ok "$node" ||
            { show_log "$node.out"; show_log "slurmctld.out"; die "$node is not up; if it is drained: revive-node $node"; }
    done
    say "up: $N nodes x $G GPUs, mode $MODE, $LAB, $((SECONDS - t0)) s"
}
down() {
    local d
    if load_shape; then
        for d in $(nodes); do kill_node "$d"; done
        for d in $(nodes); do ip route del unreachable "$NET.$((10 + ${d#n}))/32" 2>/dev/null || true; done
        for d in slurmctld slurmdbd mariadbd munged; do stop "$d" KILL; done # their state goes as well
        if [[ $MODE == ns ]]; then ip link del "$BRIDGE" 2>/dev/null || true; fi
        if [[ $MODE == flat ]]; then # /etc/hosts may be a mount: rewrite it in place
            d=$(grep -v "# $BRIDGE\$" /etc/hosts) && echo "$d" >/etc/hosts
        fi
        rm -rf "$LAB"/{etc,run,state,spool,dev,db,hooks,shape}
    fi
    say "down: $LAB"
}
status() {
    load_shape || { echo "no cluster in $LAB"; exit 3; }
    local d
    echo "$N nodes x $G GPUs, mode $MODE, SLURM_CONF=$CONF"
    for d in munged mariadbd slurmdbd slurmctld $(nodes); do
        printf '%-10s %s\n' "$d" "$(up_p "$d" && echo "running (pid $(pid_of "$d"))" || echo dead)"
    done
    if up_p slurmctld; then sinfo -N -o '%6N %12T %10G %E' | sort -u; squeue; fi
}
locked() { mkdir -p "${LAB%/*}"; exec 9>"$LAB.lock"; flock -w 120 9 || die "another cluster.sh holds $LAB.lock"; }

[[ ${1:-} == __node ]] && { node_main "$2" "$3"; exit; }
[[ $(id -u) == 0 ]] || die "must run as root"
((${#LAB} <= 60)) && [[ $LAB == /* ]] || die "SLURM_LAB_DIR must be absolute and at most 60 characters (socket paths): $LAB"
cmd=${1:-}; shift || true
case $cmd in
    up) locked; up "$@" ;;
    down) locked; down ;;
    kill-node) locked; need_node "${1:-}"; kill_node "$1" ;;
    revive-node)
        locked; need_node "${1:-}"; start_node "$1"
        wait_for "$1 to return" revived "$1" || { show_log "$1.out"; die "$1 did not come back"; }
        ;;
    restart-ctld)
        locked; load_shape || die "no cluster in $LAB"
        # KILL loses what slurmctld has not saved yet (up to ~5 s: jobs run twice, vanish, drain nodes)
        stop slurmctld "${1:-TERM}"; start_ctld
        ;;
    exec)
        need_node "${1:-}"; up_p "$1" || die "$1 is dead"
        on_node "$@"
        ;;
    env) echo "export SLURM_CONF=$CONF" ;;
    status) status ;;
    *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$SELF"; exit 2 ;;
esac
