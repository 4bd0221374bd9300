// Lists everything in `fabric::raw` that has a C layout. The including file defines `layout!`,
// which receives structures with their fields (`field = C name`) and constants.
layout! {
    structures {
        fi_tx_attr { caps mode op_flags msg_order comp_order inject_size size iov_limit
        rma_iov_limit tclass }
        fi_rx_attr { caps mode op_flags msg_order comp_order total_buffered_recv size iov_limit }
        fi_ep_attr {
            protocol protocol_version max_msg_size msg_prefix_size max_order_raw_size
            max_order_war_size
            max_order_waw_size mem_tag_format tx_ctx_cnt rx_ctx_cnt auth_key_size auth_key
        }
        fi_domain_attr {
            domain name threading control_progress resource_mgmt av_type mr_mode mr_key_size
            cq_data_size
            cq_cnt ep_cnt tx_ctx_cnt rx_ctx_cnt max_ep_tx_ctx max_ep_rx_ctx max_ep_stx_ctx
            max_ep_srx_ctx cntr_cnt
            mr_iov_limit caps mode auth_key auth_key_size max_err_data mr_cnt tclass
        }
        fi_fabric_attr { fabric name prov_name prov_version api_version }
        fi_info {
            next caps mode addr_format src_addrlen dest_addrlen src_addr dest_addr handle tx_attr
            rx_attr ep_attr
            domain_attr fabric_attr nic
        }
        fi_device_attr { name device_id device_version vendor_id driver firmware }
        fi_pci_attr { domain_id bus_id device_id function_id }
        fi_bus_attr { bus_type }
        fi_link_attr { address mtu speed state network_type }
        fid_nic { fid device_attr bus_attr link_attr prov_attr }
        fi_av_attr { rx_ctx_bits count ep_per_node name map_addr flags }
        fi_cq_attr { size flags format wait_obj signaling_vector wait_cond wait_set }
        fi_cq_data_entry { op_context flags len buf data }
        fi_cq_err_entry { op_context flags len buf data tag olen err prov_errno err_data
        err_data_size }
        fi_rma_iov { addr len key }
        fi_msg { msg_iov desc iov_count addr context data }
        fi_msg_rma { msg_iov desc iov_count addr rma_iov rma_iov_count context data }
        fi_context { internal }
        fi_context2 { internal }
        fid { fclass context ops }
        fid_fabric { fid ops api_version }
        fid_domain { fid ops mr }
        fid_mr { fid mem_desc key }
        fid_av { fid ops }
        fid_cq { fid ops }
        fid_ep { fid ops cm msg rma tagged atomic collective }
        fi_ops { size close bind control ops_open tostr ops_set }
        fi_ops_fabric { size domain passive_ep eq_open wait_open trywait domain2 }
        fi_ops_domain {
            size av_open cq_open endpoint scalable_ep cntr_open poll_open stx_ctx srx_ctx
            query_atomic query_collective
            endpoint2
        }
        fi_mr_attr { iov_count access offset requested_key context auth_key_size auth_key iface
        device }
        fi_ops_mr { size reg regv regattr }
        fi_ops_av { size insert insertsvc insertsym remove lookup straddr av_set }
        fi_ops_cq { size read readfrom readerr sread sreadfrom signal strerror }
        fi_ops_ep { size cancel getopt setopt tx_ctx rx_ctx rx_size_left tx_size_left }
        fi_ops_cm { size setname getname getpeer connect listen accept reject shutdown join }
        fi_ops_msg { size recv recvv recvmsg send sendv sendmsg inject senddata injectdata }
        fi_ops_rma { size read readv readmsg write writev writemsg inject writedata injectdata }
        fi_ops_atomic {
            size write writev writemsg inject readwrite readwritev readwritemsg compwrite compwritev
            compwritemsg
            writevalid readwritevalid compwritevalid
        }
    }
    // Fields that are Rust keywords or lie in a C union: our name, the C name, and the name in
    // generated bindings.
    renamed {
        fi_ep_attr r#type "type" type_
        fi_av_attr r#type "type" type_
        fi_bus_attr pci "attr" attr
        fi_domain_attr data_progress "data_progress" __bindgen_anon_1
        fi_mr_attr mr_iov "mr_iov" __bindgen_anon_1
    }
    numbers {
        FI_PROV_ATTR_ONLY FI_NUMERICHOST
        FI_MSG FI_RMA FI_TAGGED FI_ATOMIC FI_READ FI_WRITE FI_RECV FI_SEND FI_TRANSMIT
        FI_REMOTE_READ FI_REMOTE_WRITE
        FI_MULTI_RECV FI_REMOTE_CQ_DATA FI_MORE FI_FENCE FI_COMPLETION FI_INJECT FI_INJECT_COMPLETE
        FI_TRANSMIT_COMPLETE FI_DELIVERY_COMPLETE FI_HMEM FI_SOURCE_ERR FI_LOCAL_COMM FI_REMOTE_COMM
        FI_RMA_EVENT
        FI_SOURCE FI_DIRECTED_RECV
        FI_CONTEXT2 FI_RX_CQ_DATA FI_MSG_PREFIX FI_CONTEXT
        FI_MR_LOCAL FI_MR_RAW FI_MR_VIRT_ADDR FI_MR_ALLOCATED FI_MR_PROV_KEY FI_MR_MMU_NOTIFY
        FI_MR_RMA_EVENT
        FI_MR_ENDPOINT FI_MR_HMEM FI_HMEM_SYSTEM FI_HMEM_CUDA FI_HMEM_ROCR FI_HMEM_ZE
        FI_PROGRESS_UNSPEC FI_PROGRESS_AUTO FI_PROGRESS_MANUAL
        FI_THREAD_UNSPEC FI_THREAD_SAFE FI_THREAD_FID FI_THREAD_DOMAIN FI_THREAD_COMPLETION
        FI_THREAD_ENDPOINT
        FI_RM_UNSPEC FI_RM_DISABLED FI_RM_ENABLED
        FI_EP_UNSPEC FI_EP_MSG FI_EP_DGRAM FI_EP_RDM
        FI_AV_UNSPEC FI_AV_MAP FI_AV_TABLE
        FI_ORDER_RAR FI_ORDER_RAW FI_ORDER_RAS FI_ORDER_WAR FI_ORDER_WAW FI_ORDER_WAS FI_ORDER_SAR
        FI_ORDER_SAW
        FI_ORDER_SAS
        FI_FORMAT_UNSPEC FI_SOCKADDR FI_SOCKADDR_IN FI_SOCKADDR_IN6 FI_SOCKADDR_IB FI_ADDR_STR
        FI_ADDR_EFA
        FI_CQ_FORMAT_UNSPEC FI_CQ_FORMAT_CONTEXT FI_CQ_FORMAT_MSG FI_CQ_FORMAT_DATA
        FI_CQ_FORMAT_TAGGED
        FI_WAIT_NONE FI_WAIT_UNSPEC FI_WAIT_FD FI_CQ_COND_NONE
        FI_CLASS_FABRIC FI_CLASS_DOMAIN FI_CLASS_EP FI_CLASS_AV FI_CLASS_MR FI_CLASS_EQ FI_CLASS_CQ
        FI_GETWAIT FI_ENABLE FI_OPT_ENDPOINT FI_OPT_FI_HMEM_P2P
        FI_BUS_UNKNOWN FI_BUS_PCI FI_LINK_UNKNOWN FI_LINK_DOWN FI_LINK_UP
        FI_UINT8 FI_UINT16 FI_UINT32 FI_UINT64
        FI_SUM FI_BOR FI_BAND FI_BXOR FI_ATOMIC_READ FI_ATOMIC_WRITE FI_CSWAP
        FI_TYPE_INFO FI_TYPE_CAPS FI_TYPE_MSG_ORDER FI_TYPE_MODE FI_TYPE_MR_MODE
        FI_EAGAIN FI_ENOSYS FI_ENODATA FI_ECANCELED FI_EOTHER FI_ETOOSMALL FI_EOPBADSTATE FI_EAVAIL
        FI_EBADFLAGS
        FI_ENOEQ FI_EDOMAIN FI_ENOCQ FI_ECRC FI_ETRUNC FI_ENOKEY FI_ENOAV FI_EOVERRUN FI_ENORX
    }
}
