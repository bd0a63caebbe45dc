# SPDX-License-Identifier: Apache-2.0
# Sources of the libraries of backends p2p and hosts. Kernels in which ranks communicate, and the
# files for the CPU, are compiled for each of the two; for hosts with EPIC_HOSTS (common/hosts.h).
# They are compiled again, with EPIC_MANY_RANKS (rules/device_layout.h), for groups of many ranks. Those of
# p2p are also compiled with EPIC_GPU_REGROUP (common/heap.h), for groups that can go on without a rank.
set(here ${CMAKE_CURRENT_LIST_DIR})
set(src ${here}/../../src)
file(GLOB epic_cuda_alone CONFIGURE_DEPENDS ${here}/router/*.cu ${here}/experts/*.cu)
list(FILTER epic_cuda_alone EXCLUDE REGEX "/(dense_tokens|layer_fits|loss)\\.cu$") # they read the group or the plan
file(GLOB epic_cuda_ranks CONFIGURE_DEPENDS ${here}/*/*.cu)
list(REMOVE_ITEM epic_cuda_ranks ${epic_cuda_alone})
set(epic_hosts_ranks ${epic_cuda_ranks})
list(FILTER epic_hosts_ranks EXCLUDE REGEX # only p2p has these
     "/(dispatch/(bulk|windows)|combine/(backward_)?windows)\\.cu$")
set(epic_many_ranks ${epic_hosts_ranks}) # with EPIC_MANY_RANKS, for p2p and for hosts
list(FILTER epic_many_ranks EXCLUDE REGEX "/lowlat/")
file(GLOB p2p CONFIGURE_DEPENDS ${src}/backend/p2p/*.c)
set(liveness ${src}/net/liveness.c ${src}/net/liveness_connect.c ${src}/net/address.c
    ${src}/bootstrap/bootstrap.c) # between hosts of an NVLink domain
set(epic_p2p_host ${p2p} ${liveness} ${src}/base/alive.c ${src}/base/error.c ${src}/base/text.c
    ${src}/base/process.c)
file(GLOB hosts CONFIGURE_DEPENDS ${src}/backend/hosts/*.c ${src}/net/*.c)
set(epic_hosts_host ${p2p} ${hosts} ${src}/base/error.c ${src}/base/text.c ${src}/base/process.c
    ${src}/base/library.c ${src}/bootstrap/bootstrap.c)
list(FILTER epic_hosts_host EXCLUDE REGEX "/p2p/(fabric|join|mailbox|watch|nccl.*)\\.c$") # peers on one host; NCCL
