# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Completion of virtio-rdmad in bash, by bash-completion. tools/deb/check-completion compares it
# with what the program says of itself.

_virtio_rdmad() {
	local cur prev words cword
	_init_completion -n =:, || return

	local command=''
	[ "$cword" -lt 2 ] || [[ ${words[1]} == -* ]] || command=${words[1]}

	local policy='gid= vlan= dscp= cnp-dscp= pcp= rate= message-rate= qps= cqs= srqs= mrs= mws= pds= groups= memory='
	case $prev in
	--control | --program | --socket | --config)
		_filedir
		return
		;;
	--guest)
		# The last KEY=VALUE of the list; what stands before it stays.
		local before='' last=$cur keys
		[[ $cur != *,* ]] || { before="${cur%,*}," last=${cur##*,}; }
		keys="name= vfio-user= vhost-user= mac= network= nic= owner= mode= rings=on rings=off virtqueues=on virtqueues=off vectors= max-qp= max-cq= $policy"
		case $last in
		vfio-user=* | vhost-user=* | nic=*)
			mapfile -t COMPREPLY < <(compgen -P "$before${last%%=*}=" -f -- "${last#*=}")
			compopt -o filenames
			;;
		*) mapfile -t COMPREPLY < <(compgen -P "$before" -W "$keys" -- "$last") ;;
		esac
		compopt -o nospace
		return
		;;
	--uplink)
		local first='' rest=$cur
		[[ $cur != *,* ]] || { first="${cur%,*}," rest=${cur##*,}; }
		mapfile -t COMPREPLY < <(compgen -P "$first" -W 'tap= interface= trains=on trains=off vxlan= local= remote= port= carrier= network=' -- "$rest")
		compopt -o nospace
		return
		;;
	--sandbox)
		mapfile -t COMPREPLY < <(compgen -W 'on off' -- "$cur")
		return
		;;
	--withhold)
		mapfile -t COMPREPLY < <(compgen -W 'page-sizes reset-to-rtr' -- "$cur")
		return
		;;
	--log)
		mapfile -t COMPREPLY < <(compgen -W 'error warn info debug trace' -- "$cur")
		return
		;;
	--workers | --cpus | --poll-us | --user | --interval | --qpn | --snaplen | --count)
		return
		;;
	esac

	if [ "$command" = set ] && [[ $cur != -* ]]; then
		local before='' last=$cur
		[[ $cur != *,* ]] || { before="${cur%,*}," last=${cur##*,}; }
		mapfile -t COMPREPLY < <(compgen -P "$before" -W "$policy" -- "$last")
		compopt -o nospace
		return
	fi
	if [ -n "$command" ]; then
		local of_command='--control --help'
		if [ "$command" = check ] && [[ $cur != -* ]]; then
			_filedir
			return
		fi
		case $command in
		status) of_command+=' --json --brief' ;;
		watch) of_command+=' --json' ;;
		trace) of_command+=' --qpn --json' ;;
		capture) of_command+=' --guest --qpn --snaplen --count' ;;
		top) of_command+=' --interval --once' ;;
		add) of_command+=' --guest' ;;
		reload) of_command+=' --config' ;;
		remove) of_command+=' --drain' ;;
		check) of_command='--help' ;;
		supervise) of_command='--program --help' ;;
		esac
		mapfile -t COMPREPLY < <(compgen -W "$of_command" -- "$cur")
		return
	fi
	local options='--guest --uplink --config --control --workers --cpus --poll-us --sandbox --user --withhold --forget-unreadable --log --help --version'
	[ "$cword" -gt 1 ] || options+=' status metrics watch trace capture top add set reload remove check supervise help'
	mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
} && complete -F _virtio_rdmad virtio-rdmad
